import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISessionContext, Notification as Shown } from '@jupyterlab/apputils';
import { IDocumentWidget } from '@jupyterlab/docregistry';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator, TranslationBundle } from '@jupyterlab/translation';
import { DisposableDelegate, IDisposable } from '@lumino/disposable';

import { isConfirmed, words } from './actions';
import { contextOf, restart } from './front';
import { INotice, isCurrent, Kind, Notices } from './notices';
import { startFresh } from './outcomes';
import { ISlices } from './tokens';

/** The settings, as in schema/plugin.json. */
interface ISettings {
  arrived: boolean;
  longWait: number;
  ending: boolean;
  parked: boolean;
  ended: boolean;
  left: boolean;
  notWoken: boolean;
  outside: boolean;
}

const DEFAULTS: ISettings = {
  arrived: true,
  longWait: 10,
  ending: true,
  parked: true,
  ended: true,
  left: true,
  notWoken: true,
  outside: true
};

/** Milliseconds after which news goes away by itself that asks for nothing; what does stays until it is read. */
const SHORT = 15_000;

/** What is shown of a kernel, by its id: the next takes the place of it, as does its end. */
const shown = new Map<string, { id: string; kind: Kind }>();

function show(notice: INotice, settings: ISettings, actions: Shown.IAction[]): void {
  const message = shortened(notice);
  const stays = notice.isWarning || actions.length > 0;
  const options = { autoClose: stays ? (false as const) : SHORT, actions };
  takeAway(notice.kernelId);
  const id = notice.isWarning ? Shown.warning(message, options) : Shown.info(message, options);
  shown.set(notice.kernelId, { id, kind: notice.kind });
  if (settings.outside && document.hidden && isAllowed()) {
    showOutside(notice);
  }
}

function takeAway(kernelId: string): void {
  const earlier = shown.get(kernelId);
  if (earlier) {
    Shown.dismiss(earlier.id);
    shown.delete(kernelId);
  }
}

/** Take away what is not so any more: a slice that has come back is lent to nobody. */
function takeAwayOutdated(slices: ISlices): void {
  for (const [kernelId, { kind }] of [...shown]) {
    if (slices.isLive && !isCurrent(kind, slices.slice(kernelId), slices.now())) {
      takeAway(kernelId);
    }
  }
}

/** JupyterLab shows 140 characters: the file's name without its folders, and nothing twice. */
function shortened({ about, kind, title, text }: INotice): string {
  const file = about.split('/').pop();
  const saysItself = text && ['parked', 'ended', 'notWoken'].includes(kind);
  return saysItself ? `${file}: ${text}` : `${file}: ${title}. ${text}`.trimEnd();
}

function showOutside({ about, kernelId, kind, title, text }: INotice): void {
  // Several pages of one server tell of the same thing: one notification.
  const tag = `gpu-pool ${kind} ${kernelId}`;
  try {
    const outside = new Notification(title, { body: `${about}\n${text}`, tag });
    outside.onclick = () => {
      window.focus();
      outside.close();
    };
  } catch (error) {
    // Browsers of telephones have the class, and refuse to make one.
    console.debug('The browser shows no notifications of pages.', error);
  }
}

function isAllowed(): boolean {
  return 'Notification' in window && Notification.permission === 'granted';
}

/** The notebooks of this page, and what is done with a kernel on disk that asks what is to be done with it. */
class LeftKernels {
  constructor(
    private readonly slices: ISlices,
    private readonly trans: TranslationBundle
  ) {}

  /** Look after a notebook; `changed` is called when its kernel is another. */
  add(notebook: IDocumentWidget, changed: () => void): IDisposable | void {
    const context = contextOf(notebook);
    if (context) {
      this.contexts.add(context);
      context.kernelChanged.connect(changed);
      return new DisposableDelegate(() => this.contexts.delete(context));
    }
  }

  /** What has the kernel. */
  context(kernelId: string): ISessionContext | undefined {
    return [...this.contexts].find(each => each.session?.kernel?.id === kernelId);
  }

  actions(kernelId: string): Shown.IAction[] {
    const fresh = this.trans.__('Start fresh');
    return [
      {
        label: this.trans.__('Continue'),
        displayType: 'accent',
        callback: () => void this.act(kernelId, () => this.slices.resume(kernelId))
      },
      {
        label: fresh,
        callback: event => {
          event.preventDefault(); // it is shown until that is confirmed
          void this.startFresh(kernelId, fresh);
        }
      }
    ];
  }

  private async startFresh(kernelId: string, label: string): Promise<void> {
    const slice = this.slices.slice(kernelId);
    if (slice && (await isConfirmed(slice, 'start-fresh', label, this.trans))) {
      const restarted = (): Promise<boolean> => restart(this.contexts, kernelId);
      await this.act(kernelId, () => startFresh(restarted, this.trans));
    }
  }

  private async act(kernelId: string, call: () => Promise<string>): Promise<void> {
    takeAway(kernelId);
    try {
      Shown.info(await call(), { autoClose: SHORT });
    } catch (error) {
      Shown.error(words(error), { autoClose: false });
    }
  }

  private readonly contexts = new Set<ISessionContext>();
}

export const notificationsPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:plugin',
  description: 'Tells when a GPU slice comes, ends, or is lent to others.',
  autoStart: true,
  requires: [ISlices],
  optional: [ISettingRegistry, ITranslator],
  activate: async (
    app: JupyterFrontEnd,
    slices: ISlices,
    registry: ISettingRegistry | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpu_pool');
    let settings = DEFAULTS;
    const left = new LeftKernels(slices, trans);
    const notices = new Notices(
      trans,
      () => settings.longWait,
      kernelId => left.context(kernelId)?.session?.path ?? null
    );
    const tell = (): void => {
      takeAwayOutdated(slices);
      for (const notice of notices.of(slices.state, slices.now())) {
        if (settings[notice.kind as Kind]) {
          const isOnDisk = notice.kind === 'left' || notice.kind === 'notWoken';
          show(notice, settings, isOnDisk ? left.actions(notice.kernelId) : []);
        }
      }
    };
    slices.changed.connect(tell);
    app.docRegistry.addWidgetExtension('Notebook', {
      createNew: (notebook: IDocumentWidget) => left.add(notebook, tell)
    });
    // An end comes nearer without a change.
    window.setInterval(tell, 30_000);
    try {
      const loaded = await registry?.load(notificationsPlugin.id);
      const read = (): void => {
        settings = { ...DEFAULTS, ...(loaded?.composite as Partial<ISettings>) };
      };
      loaded?.changed.connect(read);
      read();
    } catch (error) {
      console.warn('The settings of GPU slices could not be read; everything is told.', error);
    }
  }
};
