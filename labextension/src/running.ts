import { JupyterFrontEndPlugin } from '@jupyterlab/application';

export const runningPlugins: JupyterFrontEndPlugin<any>[] = [];
