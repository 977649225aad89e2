import { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { kernelStatusPlugins } from './kernelStatus';
import { launcherPlugins } from './launcher';
import { runningPlugins } from './running';
import { slicesPlugin } from './slices';

const plugins: JupyterFrontEndPlugin<any>[] = [
  slicesPlugin,
  ...launcherPlugins,
  ...runningPlugins,
  ...kernelStatusPlugins
];

export default plugins;
export { ISlices } from './tokens';
