import { Token } from '@lumino/coreutils';
import { ISignal } from '@lumino/signaling';

import { IMemoryHistory, IOffers, IResized, ISlice, IState } from './contract';

/** The slices of this server's kernels, live; the same for all parts of the page. */
export interface ISlices {
  /** Emitted after every change, of the slices or of whether they are live. */
  readonly changed: ISignal<ISlices, void>;
  /** null until something is known: no GPU kernels, no server extension, or not yet answered. */
  readonly state: IState | null;
  /** Whether changes arrive; otherwise the state is the last one known. */
  readonly isLive: boolean;
  /** Whether there are kernels of the pool at all. */
  readonly isOffered: boolean;
  /** The server's clock, in Unix seconds. */
  now(): number;
  slice(kernelId: string | null | undefined): ISlice | null;
  memory(kernelId: string): Promise<IMemoryHistory>;
  offers(): Promise<IOffers>;
  /** The rest answer with what the pool says of it, or throw an ApiError. */
  keep(kernelId: string, seconds: number): Promise<string>;
  /** `atRestart`: not before the kernel is restarted, which is the caller's to do. */
  resize(kernelId: string, size: string, atRestart: boolean): Promise<IResized>;
  giveBack(kernelId: string): Promise<string>;
  resume(kernelId: string): Promise<string>;
  leaveQueue(kernelId: string): Promise<string>;
}

export const ISlices = new Token<ISlices>(
  'jupyter-gpu-pool:ISlices',
  "The GPU slices of this server's kernels."
);
