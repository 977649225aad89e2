import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { KernelSpec, ServiceManager } from '@jupyterlab/services';
import { ISignal, Signal } from '@lumino/signaling';

import { ApiError, ask, kernelPath, openEvents } from './api';
import { IMemoryHistory, IOffers, IResized, ISlice, IState } from './contract';
import { ISocket, Stream } from './stream';
import { ISlices } from './tokens';

/** Milliseconds for which a page was out of sight, from which on its socket is opened anew. */
const AWAY = 60_000;

/** The size that a kernelspec asks a pool for, empty where it leaves that open; null where it asks none. */
export function sizeOf(spec: KernelSpec.ISpecModel | undefined): string | null {
  const provisioner = spec?.metadata?.kernel_provisioner as any;
  return provisioner?.provisioner_name === 'gpu-pool' ? `${provisioner.config?.slice ?? ''}` : null;
}

/** Follows the slices over one socket, as long as there are kernels of the pool. */
export class Slices implements ISlices {
  constructor(private readonly services: ServiceManager.IManager) {
    const settings = services.serverSettings;
    this.stream = new Stream(
      () => openEvents(settings) as unknown as ISocket,
      data => this.update(JSON.parse(data), true),
      () => this.update(this.state, false)
    );
    services.kernelspecs.specsChanged.connect(() => this.follow());
    void services.kernelspecs.ready.then(() => this.follow());
    window.addEventListener('online', () => this.listenAnew());
    document.addEventListener('visibilitychange', () => {
      const hiddenFor = document.hidden ? 0 : Date.now() - this.hiddenAt;
      this.hiddenAt = document.hidden ? Date.now() : Infinity;
      if (hiddenFor > AWAY) {
        this.listenAnew();
      }
    });
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get state(): IState | null {
    return this._state;
  }

  get isLive(): boolean {
    return this._isLive;
  }

  get isOffered(): boolean {
    const specs = this.services.kernelspecs.specs?.kernelspecs ?? {};
    return Object.values(specs).some(spec => sizeOf(spec) !== null);
  }

  now(): number {
    return Date.now() / 1000 + this.ahead;
  }

  slice(kernelId: string | null | undefined): ISlice | null {
    return this._state?.slices.find(each => each.kernel_id === kernelId) ?? null;
  }

  async memory(kernelId: string): Promise<IMemoryHistory> {
    return this.ask<IMemoryHistory>(kernelPath(kernelId, 'memory'));
  }

  async offers(): Promise<IOffers> {
    return this.ask<IOffers>('offers');
  }

  async keep(kernelId: string, seconds: number): Promise<string> {
    return this.tell(kernelId, 'keep', { seconds });
  }

  async resize(kernelId: string, size: string, atRestart: boolean): Promise<IResized> {
    return this.ask<IResized>(kernelPath(kernelId, 'resize'), { size, at_restart: atRestart });
  }

  async giveBack(kernelId: string): Promise<string> {
    return this.tell(kernelId, 'give-back', {});
  }

  async resume(kernelId: string): Promise<string> {
    return this.tell(kernelId, 'resume', {});
  }

  async leaveQueue(kernelId: string): Promise<string> {
    return this.tell(kernelId, 'leave-queue', {});
  }

  /** Listen where there are kernels of the pool and a server extension, and else not. */
  private async follow(): Promise<void> {
    if (!this.isOffered) {
      this.isFollowing = false;
      this.stream.stop();
      this.update(null, false);
      return;
    }
    if (this.isFollowing) {
      return;
    }
    this.isFollowing = true;
    try {
      // A socket that is refused does not say why; this does, and shows the state at once.
      const { body, at } = await ask<IState>(this.services.serverSettings, 'slices');
      const ahead = at - Date.now() / 1000;
      // The header has whole seconds, and the answer was on its way.
      this.ahead = Math.abs(ahead) > 5 ? ahead : 0;
      this.update(body, true);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) {
        this.isFollowing = false;
        return;
      }
    }
    if (this.isFollowing) {
      this.stream.start();
    }
  }

  /** After a sleep or without a network, a socket may be dead for minutes before the browser says so. */
  private listenAnew(): void {
    if (this.isFollowing) {
      this.stream.stop();
      this.stream.start();
    }
  }

  private update(state: IState | null, isLive: boolean): void {
    this._state = state;
    this._isLive = isLive;
    this._changed.emit();
  }

  private async ask<T>(path: string, body?: object): Promise<T> {
    return (await ask<T>(this.services.serverSettings, path, body)).body;
  }

  private async tell(kernelId: string, action: string, body: object): Promise<string> {
    return (await this.ask<{ message: string }>(kernelPath(kernelId, action), body)).message;
  }

  private readonly stream: Stream;
  private readonly _changed = new Signal<this, void>(this);
  private _state: IState | null = null;
  private _isLive = false;
  private isFollowing = false;
  private ahead = 0;
  private hiddenAt = Infinity;
}

export const slicesPlugin: JupyterFrontEndPlugin<ISlices> = {
  id: 'jupyter-gpu-pool:slices',
  description: "Follows the GPU slices of this server's kernels.",
  autoStart: true,
  provides: ISlices,
  activate: (app: JupyterFrontEnd): ISlices => new Slices(app.serviceManager)
};
