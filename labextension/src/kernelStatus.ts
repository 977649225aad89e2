import { JupyterFrontEndPlugin } from '@jupyterlab/application';

export const kernelStatusPlugins: JupyterFrontEndPlugin<any>[] = [];
