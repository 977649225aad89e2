import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILauncher } from '@jupyterlab/launcher';
import { KernelSpec } from '@jupyterlab/services';
import { ITranslator, nullTranslator, TranslationBundle } from '@jupyterlab/translation';
import { LabIcon } from '@jupyterlab/ui-components';
import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';

import { ApiError } from './api';
import { IOffer, IOffers } from './contract';
import { gpuIcon } from './icon';
import { kernelIcon } from './kernelIcon';
import { availability, differ, explanation, rank } from './offers';
import { sizeOf } from './slices';
import { ISlices } from './tokens';

/** JupyterLab's own commands, and ours, which starts a notebook and says what is free. */
const CREATE = 'notebook:create-new';
const CREATE_CONSOLE = 'console:create';
const START = 'gpu-pool:create-notebook';
/** Between JupyterLab's "Notebook", which is 0, and "Console", which is 20 (from 4.6 on). */
const CATEGORY_RANK = 10;
/** What consoles add to their rank, so that the one of the default kernel, which is 0, stays the first. */
const AFTER_DEFAULT = 1;
/** Milliseconds between two looks at what is free, while a launcher is in sight. */
const LOOK_EVERY = 10_000;
/** Milliseconds for which an answer is good enough for a launcher that is just opened. */
const FRESH = 5_000;

/** What is free, as long as a launcher is in sight: one look for all of them. */
class FreeSlices {
  constructor(
    private readonly shell: JupyterFrontEnd.IShell,
    private readonly slices: ISlices
  ) {
    window.setInterval(() => this.lookIfSeen(), LOOK_EVERY);
    document.addEventListener('visibilitychange', () => this.lookIfSeen());
  }

  of(kernel: unknown): IOffer | undefined {
    return this.offers?.kernels[String(kernel)];
  }

  /** Ask, unless that was done lately; what has changed is shown. */
  async look(): Promise<void> {
    if (this.isMissing || !this.slices.isOffered || Date.now() < this.lookedAt + FRESH) {
      return;
    }
    this.lookedAt = Date.now();
    let offers: IOffers | null = null;
    try {
      offers = await this.slices.offers();
    } catch (error) {
      // Without the server's part, nobody will ever answer.
      this.isMissing = error instanceof ApiError && error.status === 404;
      console.debug('What is free of the GPU pool is not known.', error);
    }
    if (differ(offers, this.offers)) {
      this.offers = offers;
      this.launchers().forEach(each => each.update());
    }
  }

  private lookIfSeen(): void {
    if (!document.hidden && this.launchers().some(each => each.isVisible)) {
      void this.look();
    }
  }

  private launchers(): Widget[] {
    return Array.from(this.shell.widgets('main'))
      .map(each => (each as any).content)
      .filter(each => each instanceof Widget && each.hasClass('jp-Launcher'));
  }

  private offers: IOffers | null = null;
  private lookedAt = 0;
  private isMissing = false;
}

/** The kernel that an item starts; undefined where it starts none. */
function kernelOf(item: ILauncher.IItemOptions): unknown {
  const args = item.args as any;
  return item.command === CREATE_CONSOLE ? args?.kernelPreference?.name : args?.kernelName;
}

/**
 * Give the notebooks of GPU kernels a section of their own, where JupyterLab lists its items, and consoles
 * the order of sizes.
 *
 * What JupyterLab adds is replaced and not added to, so that no kernel stands twice. Where its items are
 * others than these, as in a release to come, they stay as they are.
 */
function divide(
  model: ILauncher.IModel,
  requested: (kernel: unknown) => string | null,
  free: FreeSlices,
  category: string
): void {
  const items = model.items.bind(model);
  // The launcher tells items apart by their identity.
  const replaced = new WeakMap<ILauncher.IItemOptions, ILauncher.IItemOptions>();
  const divided = (item: ILauncher.IItemOptions): ILauncher.IItemOptions => {
    const kernel = kernelOf(item);
    const isKnown = item.command === CREATE || item.command === CREATE_CONSOLE;
    const size = isKnown ? requested(kernel) : null;
    if (size === null) {
      return item;
    }
    void free.look();
    const moved =
      item.command === CREATE ? { command: START, category, categoryRank: CATEGORY_RANK } : {};
    const ours = replaced.get(item) ?? { ...item, ...moved };
    ours.rank = rank(free.of(kernel), size) + (item.command === CREATE ? 0 : AFTER_DEFAULT);
    replaced.set(item, ours);
    return ours;
  };
  model.items = () => Array.from(items(), divided)[Symbol.iterator]();
}

function addCommand(
  commands: CommandRegistry,
  free: FreeSlices,
  logo: (kernel: string) => string | undefined,
  trans: TranslationBundle
): void {
  const offer = (args: any): IOffer | undefined => free.of(args.kernelName);
  const icons = new Map<string, LabIcon>();
  const icon = (kernel: string): LabIcon => {
    const url = logo(kernel);
    if (!url) {
      return gpuIcon;
    }
    const known = icons.get(url) ?? kernelIcon(kernel, url);
    icons.set(url, known);
    return known;
  };
  commands.addCommand(START, {
    label: args =>
      [commands.label(CREATE, args), availability(offer(args), trans)].filter(Boolean).join('\n'),
    caption: args => explanation(commands.label(CREATE, args), offer(args), trans),
    icon: args => icon(String(args.kernelName)),
    describedBy: { args: { type: 'object', properties: { kernelName: { type: 'string' } } } },
    execute: args => commands.execute(CREATE, args)
  });
}

const launcherPlugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-gpu-pool:launcher',
  description: 'Shows GPU kernels in a section of the launcher, by size, and what is free.',
  autoStart: true,
  requires: [ISlices],
  optional: [ILauncher, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    slices: ISlices,
    launcher: ILauncher | null,
    translator: ITranslator | null
  ) => {
    const model = launcher as ILauncher.IModel | null;
    if (typeof model?.items !== 'function') {
      return;
    }
    const trans = (translator ?? nullTranslator).load('jupyter_gpu_pool');
    const free = new FreeSlices(app.shell, slices);
    const spec = (kernel: unknown): KernelSpec.ISpecModel | undefined =>
      app.serviceManager.kernelspecs.specs?.kernelspecs[String(kernel)] ?? undefined;
    const logo = (kernel: string): string | undefined => {
      const resources = spec(kernel)?.resources ?? {};
      return resources['logo-svg'] || resources['logo-64x64'];
    };
    addCommand(app.commands, free, logo, trans);
    divide(model, kernel => sizeOf(spec(kernel)), free, trans.__('GPU'));
  }
};

export const launcherPlugins: JupyterFrontEndPlugin<any>[] = [launcherPlugin];
