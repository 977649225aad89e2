import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { DocumentRegistry } from '@jupyterlab/docregistry';
import { INotebookModel, NotebookPanel } from '@jupyterlab/notebook';
import { IDisposable } from '@lumino/disposable';

import { isNotice, mayWait } from './notices';
import { ISlices } from './tokens';

/** Milliseconds after which what a cell shows is out of date: what tells of a new wait comes by another way. */
const SETTLES = 3_000;

/** The outputs of a cell, as far as they are used here. */
interface IOutputs {
  toJSON(): any[];
  fromJSON(outputs: any[]): void;
}

/**
 * Takes what a cell showed of its wait out of a notebook whose kernel waits no more.
 *
 * The kernel does so itself, but only in a page that hears of it: not in one that was closed meanwhile, and
 * not in a file that another program has saved.
 */
class NoticeRemover implements IDisposable {
  constructor(
    private readonly panel: NotebookPanel,
    private readonly slices: ISlices
  ) {
    slices.changed.connect(this.look, this);
    panel.sessionContext.kernelChanged.connect(this.look, this);
    void panel.context.ready.then(() => this.look());
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    if (!this._isDisposed) {
      this._isDisposed = true;
      window.clearTimeout(this.timer);
      this.slices.changed.disconnect(this.look, this);
      this.panel.sessionContext.kernelChanged.disconnect(this.look, this);
    }
  }

  private look(): void {
    if (this._isDisposed || this.timer || !this.isOver || !this.marked().length) {
      return;
    }
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      if (!this._isDisposed && this.isOver) {
        for (const outputs of this.marked()) {
          outputs.fromJSON(outputs.toJSON().filter(each => !isNotice(each)));
        }
      }
    }, SETTLES);
  }

  /** Whether it is known that no cell of this notebook waits. */
  private get isOver(): boolean {
    const { slices, panel } = this;
    const isKnown = slices.isLive || !slices.isOffered;
    return isKnown && !mayWait(slices.slice(panel.sessionContext.session?.kernel?.id));
  }

  private marked(): IOutputs[] {
    const cells = this.panel.content.model?.cells;
    const outputs: IOutputs[] = [];
    for (let n = 0; cells && n < cells.length; n++) {
      const found: IOutputs | undefined = (cells.get(n) as any).outputs;
      if (found?.toJSON().some(isNotice)) {
        outputs.push(found);
      }
    }
    return outputs;
  }

  private _isDisposed = false;
  private timer = 0;
}

class NoticeRemovers implements DocumentRegistry.IWidgetExtension<NotebookPanel, INotebookModel> {
  constructor(private readonly slices: ISlices) {}

  createNew(panel: NotebookPanel): IDisposable {
    return new NoticeRemover(panel, this.slices);
  }
}

export const waitNoticesPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:wait-notices',
  description: 'Takes away what cells showed of a wait that is over.',
  autoStart: true,
  requires: [ISlices],
  activate: (app: JupyterFrontEnd, slices: ISlices) => {
    app.docRegistry.addWidgetExtension('Notebook', new NoticeRemovers(slices));
  }
};
