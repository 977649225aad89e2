import { JupyterFrontEndPlugin } from '@jupyterlab/application';

export const launcherPlugins: JupyterFrontEndPlugin<any>[] = [];
