import { JupyterFrontEnd } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { KernelAPI } from '@jupyterlab/services';
import { VDomModel } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';

import { ISlice } from './contract';
import { ISlices } from './tokens';

/** Milliseconds between two looks at the clock: what is shown counts minutes. */
const TICK = 10_000;

/** Notebooks and consoles have one, and so have the documents of other extensions that run kernels. */
export function contextOf(widget: Widget | null): ISessionContext | null {
  return (widget as any)?.sessionContext ?? null;
}

/**
 * Restart a kernel through the page's own connection, so that its running cells are told.
 *
 * Does nothing, and returns false, once none of the contexts has it, or it has ended.
 */
export async function restart(
  contexts: Iterable<ISessionContext | null>,
  kernelId: string
): Promise<boolean> {
  const found = Array.from(contexts).find(each => each?.session?.kernel?.id === kernelId);
  const kernel = found?.session?.kernel;
  // That another page has ended it, this one may not have heard; and a restart that fails, JupyterLab tells
  // the browser's console alone.
  if (!found || !kernel || !(await KernelAPI.getKernelModel(kernelId, kernel.serverSettings))) {
    return false;
  }
  await found.restartKernel();
  return true;
}

/** The slice of the notebook or console in front; its state changes with whatever is shown of it. */
export class FrontSlice extends VDomModel {
  constructor(
    private readonly shell: JupyterFrontEnd.IShell,
    readonly slices: ISlices
  ) {
    super();
    slices.changed.connect(this.emit, this);
    shell.currentChanged?.connect(this.look, this);
    this.look();
    this.timer = window.setInterval(() => {
      if (this.slice && !document.hidden) {
        this.emit();
      }
    }, TICK);
  }

  get slice(): ISlice | null {
    return this.slices.slice(this.kernelId);
  }

  get kernelId(): string | undefined {
    return this.context?.session?.kernel?.id;
  }

  /** What has the kernel whose slice this is. */
  get widget(): Widget | null {
    return this._widget;
  }

  /** Restart that kernel; false where nothing that is open has it any more, or it has ended. */
  async restart(kernelId: string): Promise<boolean> {
    return restart(Array.from(this.shell.widgets('main'), contextOf), kernelId);
  }

  /** The path of what is in front. */
  get path(): string | null {
    return this.context?.session?.path ?? null;
  }

  dispose(): void {
    window.clearInterval(this.timer);
    super.dispose();
  }

  private look(): void {
    const widget = this.shell.currentWidget;
    this.context?.kernelChanged.disconnect(this.emit, this);
    this.context = contextOf(widget);
    this.context?.kernelChanged.connect(this.emit, this);
    this._widget = this.context ? widget : null;
    this.emit();
  }

  private emit(): void {
    this.stateChanged.emit();
  }

  private context: ISessionContext | null = null;
  private _widget: Widget | null = null;
  private readonly timer: number;
}
