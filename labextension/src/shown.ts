import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { IDocumentWidget } from '@jupyterlab/docregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { DisposableDelegate, IDisposable } from '@lumino/disposable';

import { FrontSlice } from './front';
import { gpuIcon } from './icon';
import { PANEL, SlicePanel } from './panel';
import { announce, SliceStatus } from './status';
import { ISlices } from './tokens';

const OPEN = 'gpu-pool:show-slice';

/** Where there is no status bar, as in Notebook 7, notebooks have the item in their toolbar. */
function addToToolbars(app: JupyterFrontEnd, make: () => SliceStatus): void {
  app.docRegistry.addWidgetExtension('Notebook', {
    createNew(panel: IDocumentWidget): IDisposable {
      const item = make();
      panel.toolbar?.insertItem(100, 'gpuSlice', item);
      return new DisposableDelegate(() => item.dispose());
    }
  });
}

export const shownPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:slice',
  description: 'Shows the GPU slice of the notebook or console in front.',
  autoStart: true,
  requires: [ISlices],
  optional: [IStatusBar, ICommandPalette, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    slices: ISlices,
    statusBar: IStatusBar | null,
    palette: ICommandPalette | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpu_pool');
    const front = new FrontSlice(app.shell, slices);
    const open = (): void => void app.commands.execute(OPEN);
    const panel = new SlicePanel(front, trans, () => {
      if (front.widget) {
        app.shell.activateById(front.widget.id);
      }
    });
    app.commands.addCommand(OPEN, {
      label: trans.__('Show the GPU Slice'),
      icon: gpuIcon,
      describedBy: { args: { type: 'object', properties: {} } },
      isVisible: () => slices.state !== null,
      execute: () => app.shell.activateById(PANEL)
    });
    palette?.addItem({ command: OPEN, category: trans.__('Kernel Operations') });
    announce(front, trans);
    if (statusBar) {
      statusBar.registerStatusItem('jupyter-gpu-pool:slice', {
        item: new SliceStatus(front, trans, open),
        align: 'left',
        rank: 100,
        priority: 1,
        isActive: () => front.slice !== null,
        activeStateChanged: front.stateChanged
      });
    } else {
      addToToolbars(app, () => new SliceStatus(front, trans, open));
    }
    // Where there are no kernels of the pool, or the server does not know of them, there is nothing to show.
    const offer = (): void => {
      if (slices.state && !panel.isAttached) {
        app.shell.add(panel, 'right', { rank: 900, type: 'GPU slice' });
      }
    };
    slices.changed.connect(offer);
    offer();
  }
};
