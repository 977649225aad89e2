import { JupyterFrontEndPlugin } from '@jupyterlab/application';

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
  ...launcherPlugins,
  ...runningPlugins,
  ...kernelStatusPlugins
];

export default plugins;
export { ISlices } from './tokens';
