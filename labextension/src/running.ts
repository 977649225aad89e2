import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { IRunningSessionManagers, IRunningSessions } from '@jupyterlab/running';
import { ITranslator, nullTranslator, TranslationBundle } from '@jupyterlab/translation';
import { LabIcon } from '@jupyterlab/ui-components';
import { Signal } from '@lumino/signaling';

import { isConfirmed, words } from './actions';
import { ISlice } from './contract';
import { gpuIcon } from './icon';
import { detail, isIdle, listed, remedy, remedyLabel, title } from './runningTexts';
import { losesVariables } from './texts';
import { ISlices } from './tokens';

/** Milliseconds between two looks at the clock: what is shown counts minutes. */
const TICK = 30_000;

/** One slice in the Running panel: a click opens its notebook, its button gives it back. */
class SliceItem implements IRunningSessions.IRunningItem {
  constructor(
    readonly slice: ISlice,
    private readonly section: SliceSection
  ) {
    const { slices } = section;
    this.className = isIdle(slice, slices.now())
      ? 'jp-GpuSlice-running jp-mod-idle'
      : 'jp-GpuSlice-running';
    if (section.canOpen(slice)) {
      this.open = () => section.open(slice);
    }
    if (remedy(slice)) {
      this.shutdown = () => void section.end(slice);
    }
  }

  icon(): LabIcon {
    return gpuIcon;
  }

  label(): string {
    return title(this.slice);
  }

  labelTitle(): string {
    const { notebook, display_name, message } = this.slice;
    return [notebook, display_name, this.detail(), message].filter(Boolean).join('\n');
  }

  detail(): string {
    return detail(this.slice, this.section.slices.now(), this.section.trans);
  }

  readonly className: string;
  readonly open?: () => void;
  readonly shutdown?: () => void;
}

/** All slices of this server's kernels. */
class SliceSection implements IRunningSessions.IManager {
  constructor(
    private readonly app: JupyterFrontEnd,
    readonly slices: ISlices,
    readonly trans: TranslationBundle
  ) {
    this.name = trans.__('GPU slices');
    this.shutdownAllLabel = trans.__('Give All Back');
    this.shutdownAllConfirmationText = trans.__(
      'Give back all GPU slices, and leave the queue? Kernels that work go on until they are idle; variables of kernels that have to be shut down are lost.'
    );
    slices.changed.connect(() => this.runningChanged.emit());
    window.setInterval(() => {
      if (!document.hidden && slices.state?.slices.some(each => isIdle(each, slices.now()))) {
        this.runningChanged.emit();
      }
    }, TICK);
  }

  running(): SliceItem[] {
    return listed(this.slices.state?.slices ?? []).map(each => new SliceItem(each, this));
  }

  refreshRunning(): void {
    // Changes arrive by themselves.
  }

  shutdownAll(): void {
    // The panel has asked whether that is meant.
    listed(this.slices.state?.slices ?? []).forEach(each => void this.giveUp(each));
  }

  readonly shutdownLabel = (item: IRunningSessions.IRunningItem): string =>
    item instanceof SliceItem ? remedyLabel(item.slice, this.trans) : '';

  canOpen(slice: ISlice): boolean {
    return this.opening(slice) !== null;
  }

  open(slice: ISlice): void {
    const command = this.opening(slice);
    if (command) {
      void this.app.commands.execute(command, { path: slice.notebook });
    }
  }

  /** Do what the button says, after a question where that loses variables. */
  async end(slice: ISlice): Promise<void> {
    const action = remedy(slice);
    const label = remedyLabel(slice, this.trans);
    if (
      action &&
      losesVariables(slice, action) &&
      !(await isConfirmed(slice, action, label, this.trans))
    ) {
      return;
    }
    await this.giveUp(slice);
  }

  private async giveUp(slice: ISlice): Promise<void> {
    const id = slice.kernel_id;
    try {
      switch (remedy(slice)) {
        case 'give-back':
          Notification.success(await this.slices.giveBack(id), { autoClose: 5000 });
          break;
        case 'leave-queue':
          Notification.success(await this.slices.leaveQueue(id), { autoClose: 5000 });
          break;
      }
    } catch (error) {
      Notification.error(`${title(slice)}: ${words(error)}`, { autoClose: false });
    }
  }

  /** The command that shows what has the kernel; null where nothing has. */
  private opening(slice: ISlice): string | null {
    const sessions = Array.from(this.app.serviceManager.sessions.running());
    const session = sessions.find(each => each.kernel?.id === slice.kernel_id);
    const command = session?.type === 'console' ? 'console:open' : 'docmanager:open';
    return slice.notebook && this.app.commands.hasCommand(command) ? command : null;
  }

  readonly name: string;
  readonly shutdownAllLabel: string;
  readonly shutdownAllConfirmationText: string;
  readonly runningChanged = new Signal<this, void>(this);
}

const runningPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:running',
  description: 'Lists the GPU slices of this server in the Running panel.',
  autoStart: true,
  requires: [ISlices],
  optional: [IRunningSessionManagers, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    slices: ISlices,
    managers: IRunningSessionManagers | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpu_pool');
    // Where there are no kernels of the pool, there is nothing to list.
    const offer = (): void => {
      if (managers && slices.isOffered) {
        slices.changed.disconnect(offer);
        managers.add(new SliceSection(app, slices, trans));
      }
    };
    slices.changed.connect(offer);
    offer();
  }
};

export const runningPlugins: JupyterFrontEndPlugin<any>[] = [runningPlugin];
