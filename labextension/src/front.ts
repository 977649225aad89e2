import { JupyterFrontEnd } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { VDomModel } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';

import { ISlice } from './contract';
import { ISlices } from './tokens';

/** Milliseconds between two looks at the clock: what is shown counts minutes. */
const TICK = 10_000;

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

  /**
   * Restart that kernel through the page's own connection, so that its running cells are told.
   *
   * Does nothing, and returns false, once another kernel is in front.
   */
  async restart(kernelId: string): Promise<boolean> {
    if (!this.context || this.kernelId !== kernelId) {
      return false;
    }
    await this.context.restartKernel();
    return true;
  }

  dispose(): void {
    window.clearInterval(this.timer);
    super.dispose();
  }

  private look(): void {
    const widget = this.shell.currentWidget;
    this.context?.kernelChanged.disconnect(this.emit, this);
    // Notebooks and consoles have one, and so have the documents of other extensions that run kernels.
    this.context = (widget as any)?.sessionContext ?? null;
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
