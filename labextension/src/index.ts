import { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { kernelStatusPlugins } from './kernelStatus';
import { launcherPlugins } from './launcher';
import { notificationsPlugin } from './notifications';
import { runningPlugins } from './running';
import { shownPlugin } from './shown';
import { slicesPlugin } from './slices';

const plugins: JupyterFrontEndPlugin<any>[] = [
  slicesPlugin,
  shownPlugin,
  notificationsPlugin,
  ...launcherPlugins,
  ...runningPlugins,
  ...kernelStatusPlugins
];

export default plugins;
export { ISlices } from './tokens';
