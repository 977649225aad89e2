import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Notification as Shown } from '@jupyterlab/apputils';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { INotice, isCurrent, Kind, Notices } from './notices';
import { ISlices } from './tokens';

/** The settings, as in schema/plugin.json. */
interface ISettings {
  arrived: boolean;
  longWait: number;
  ending: boolean;
  parked: boolean;
  ended: boolean;
  outside: boolean;
}

const DEFAULTS: ISettings = {
  arrived: true,
  longWait: 10,
  ending: true,
  parked: true,
  ended: true,
  outside: true
};

/** Milliseconds after which news goes away by itself that asks for nothing; warnings stay until they are read. */
const SHORT = 15_000;

/** What is shown of a kernel, by its id: the next takes the place of it, as does its end. */
const shown = new Map<string, { id: string; kind: Kind }>();

function show(notice: INotice, settings: ISettings): void {
  const message = shortened(notice);
  const options = { autoClose: notice.isWarning ? (false as const) : SHORT };
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
  const saysItself = text && (kind === 'parked' || kind === 'ended');
  return saysItself ? `${file}: ${text}` : `${file}: ${title}. ${text}`;
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
    const notices = new Notices(trans, () => settings.longWait);
    const tell = (): void => {
      takeAwayOutdated(slices);
      for (const notice of notices.of(slices.state, slices.now())) {
        if (settings[notice.kind as Kind]) {
          show(notice, settings);
        }
      }
    };
    slices.changed.connect(tell);
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
