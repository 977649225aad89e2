import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { DocumentRegistry, IDocumentWidget } from '@jupyterlab/docregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator, TranslationBundle } from '@jupyterlab/translation';
import { IDisposable } from '@lumino/disposable';
import { Widget } from '@lumino/widgets';

import { place } from './texts';
import { ISlices } from './tokens';

/** JupyterLab's item with the kernel's name, before which ours stands. */
const KERNEL_NAME = 'kernelName';

/**
 * Says in a notebook's toolbar that its kernel waits for its slice.
 *
 * JupyterLab knows a fixed set of states of a kernel, so that one in the queue is idle or busy to it.
 */
class QueueItem extends Widget {
  constructor(
    private readonly slices: ISlices,
    private readonly context: ISessionContext,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-GpuSlice-queue');
    slices.changed.connect(this.look, this);
    context.kernelChanged.connect(this.look, this);
    this.look();
  }

  dispose(): void {
    this.slices.changed.disconnect(this.look, this);
    this.context.kernelChanged.disconnect(this.look, this);
    super.dispose();
  }

  private look(): void {
    const slice = this.slices.slice(this.context.session?.kernel?.id);
    const waits = slice !== null && ['asking', 'waiting', 'resuming'].includes(slice.state);
    this.setHidden(!waits);
    if (waits) {
      const { position, message } = slice;
      // Short, since JupyterLab takes from sight what does not fit: its own indicator is the last.
      this.node.textContent =
        position === null ? this.trans.__('Queue') : this.trans.__('Queue: %1', position);
      this.node.title = [place(position, this.trans), message].filter(Boolean).join('\n');
    }
  }
}

class QueueItems implements DocumentRegistry.WidgetExtension {
  constructor(
    private readonly slices: ISlices,
    private readonly trans: TranslationBundle
  ) {}

  createNew(panel: IDocumentWidget & { sessionContext?: ISessionContext }): IDisposable | void {
    if (!panel.sessionContext || !panel.toolbar) {
      return;
    }
    const item = new QueueItem(this.slices, panel.sessionContext, this.trans);
    if (!panel.toolbar.insertBefore(KERNEL_NAME, 'gpuQueue', item)) {
      panel.toolbar.addItem('gpuQueue', item);
    }
    return item;
  }
}

const kernelStatusPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:kernel-status',
  description: 'Says in the toolbar of a notebook that its kernel is in the queue.',
  autoStart: true,
  requires: [ISlices],
  optional: [IStatusBar, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    slices: ISlices,
    statusBar: IStatusBar | null,
    translator: ITranslator | null
  ) => {
    // Without a status bar, all of the slice stands in the toolbar.
    if (statusBar) {
      const trans = (translator ?? nullTranslator).load('jupyter_gpu_pool');
      app.docRegistry.addWidgetExtension('Notebook', new QueueItems(slices, trans));
    }
  }
};

export const kernelStatusPlugins: JupyterFrontEndPlugin<any>[] = [kernelStatusPlugin];
