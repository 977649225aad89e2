import { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { kernelNamesPlugin } from './kernelNames';
import { kernelStatusPlugins } from './kernelStatus';
import { launcherPlugins } from './launcher';
import { notificationsPlugin } from './notifications';
import { runningPlugins } from './running';
import { shownPlugin } from './shown';
import { slicesPlugin } from './slices';
import { waitNoticesPlugin } from './waitNotices';

const plugins: JupyterFrontEndPlugin<any>[] = [
  slicesPlugin,
  shownPlugin,
  notificationsPlugin,
  waitNoticesPlugin,
  kernelNamesPlugin,
  ...launcherPlugins,
  ...runningPlugins,
  ...kernelStatusPlugins
];

export default plugins;
export { ISlices } from './tokens';
