import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { Signal } from '@lumino/signaling';

import { contextOf } from './front';
import { nameOnSize } from './texts';
import { ISlices } from './tokens';

/** What JupyterLab calls the kernel of a session. */
const NAME = 'kernelDisplayName';

/**
 * Lets JupyterLab call a kernel by the size that it has.
 *
 * The name is that of the kernelspec, which tells the size with which the kernel was started; beside the size
 * to which it has changed since then, that is wrong.
 */
class KernelNames {
  constructor(
    private readonly shell: JupyterFrontEnd.IShell,
    private readonly slices: ISlices
  ) {
    slices.changed.connect(() => this.look());
    shell.currentChanged?.connect(() => this.look());
  }

  private look(): void {
    for (const widget of this.slices.isOffered ? this.shell.widgets('main') : []) {
      const context = contextOf(widget);
      if (context && !context.isDisposed) {
        this.follow(context);
      }
    }
  }

  private follow(context: ISessionContext): void {
    if (!this.shown.has(context) && !this.replaceName(context)) {
      return;
    }
    const name = context.kernelDisplayName;
    if (name !== this.shown.get(context)) {
      this.shown.set(context, name);
      this.tell(context);
    }
  }

  /** Put a name of ours in front of JupyterLab's own; false where that has none, as in a release to come. */
  private replaceName(context: ISessionContext): boolean {
    const own = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(context), NAME)?.get;
    if (!own) {
      return false;
    }
    const get = (): string =>
      nameOnSize(own.call(context), this.slices.slice(context.session?.kernel?.id));
    this.shown.set(context, own.call(context));
    Object.defineProperty(context, NAME, { configurable: true, get });
    // Whatever shows the name looks at it then, too.
    context.kernelChanged.connect(() => this.shown.set(context, context.kernelDisplayName));
    return true;
  }

  /** Have it shown: whatever shows the name looks at it when the kernel has changed. */
  private tell(context: ISessionContext): void {
    const kernel = context.session?.kernel ?? null;
    const changed = context.kernelChanged;
    if (changed instanceof Signal) {
      // To JupyterLab's own status item, only what is told twice is new.
      for (let n = 0; n < 2; n++) {
        changed.emit({ name: 'kernel', oldValue: kernel, newValue: kernel });
      }
    }
  }

  /** The name of each kernel as it was shown last. */
  private readonly shown = new WeakMap<ISessionContext, string>();
}

export const kernelNamesPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:kernel-names',
  description: 'Calls kernels by the size that their slice has.',
  autoStart: true,
  requires: [ISlices],
  activate: (app: JupyterFrontEnd, slices: ISlices) => {
    new KernelNames(app.shell, slices);
  }
};
