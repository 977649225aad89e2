/** What is told to a person who does not look. Pure: two states in, notices out. */

import type { TranslationBundle } from '@jupyterlab/translation';

import { ISlice, IState } from './contract';
import { about, duration, endsAt, sizeName } from './texts';

type Words = Pick<TranslationBundle, '__' | '_n'>;

export type Kind = 'arrived' | 'ending' | 'parked' | 'ended' | 'left' | 'notWoken';

export interface INotice {
  kind: Kind;
  kernelId: string;
  /** Which notebook or kernel it is about. */
  about: string;
  title: string;
  text: string;
  isWarning: boolean;
}

/** How leases end that their own person ended. */
const OWN_ENDS = ['released', 'withdrawn'];
const WAITS = ['asking', 'waiting', 'resuming'];
const HAS_SLICE = ['held', 'starting'];

/** What marks an output by which a cell shows how its kernel waits. */
export function isNotice(output: unknown): boolean {
  const ours = (output as any)?.metadata?.gpu_pool;
  return ours?.notice === 'waiting';
}

/** Whether a cell of a kernel may wait; not of one that has no slice and asks for none. */
export function mayWait(slice: ISlice | null): boolean {
  return slice !== null && [...WAITS, 'starting'].includes(slice.state);
}

/** Whether what was told of a slice is still so; an arrival and an end are, for good. */
export function isCurrent(kind: Kind, slice: ISlice | null, now: number): boolean {
  switch (kind) {
    case 'parked':
      return slice?.state === 'parked' || slice?.state === 'resuming';
    case 'left':
      return Boolean(slice?.left_kernel) && !slice?.wake_error;
    case 'notWoken':
      return Boolean(slice?.wake_error);
    case 'ending':
      return slice !== null && endsAt(slice, now) !== null;
    default:
      return true;
  }
}

/** Remembers what has been told, so that nothing is told twice. */
export class Notices {
  /**
   * `longWait` is in seconds: who waited longer is told that the wait is over. `openPath` is the path of what this
   * page has of a kernel: of one that another server has left, or could not be woken, no other page tells.
   */
  constructor(
    private readonly trans: Words,
    readonly longWait: () => number,
    readonly openPath: (kernelId: string) => string | null
  ) {}

  /** Return what is new since the last call; in the first, nothing is but kernels that another server has left. */
  of(state: IState | null, now: number): INotice[] {
    const found: INotice[] = [];
    for (const slice of state?.slices ?? []) {
      const before = this.before.get(slice.kernel_id);
      if (WAITS.includes(slice.state)) {
        const since = this.since.get(slice.kernel_id) ?? slice.requested_at ?? now;
        this.since.set(slice.kernel_id, before?.state === 'parked' ? now : since);
      }
      if (before) {
        found.push(...this.changed(before, slice, now));
      }
      found.push(...this.left(slice), ...this.ending(slice, now));
      if (!WAITS.includes(slice.state)) {
        this.since.delete(slice.kernel_id);
      }
    }
    this.forget(state);
    return found;
  }

  private changed(before: ISlice, slice: ISlice, now: number): INotice[] {
    const { trans } = this;
    if (WAITS.includes(before.state) && HAS_SLICE.includes(slice.state)) {
      const waited = now - (this.since.get(slice.kernel_id) ?? now);
      return waited < this.longWait()
        ? []
        : [
            this.notice('arrived', slice, trans.__('Your GPU slice is here'), [
              trans.__('%1, after %2.', sizeName(slice.size, trans), duration(waited, trans))
            ])
          ];
    }
    // Who gave it back knows. A kernel that gives way to others may do so many times a day, and takes it again.
    const isTold = !slice.given_back && !slice.gives_way;
    if (before.state === 'held' && slice.state === 'parked' && isTold) {
      const kept = trans.__('Variables are kept; the next cell waits for a slice.');
      const said = slice.message || kept;
      return [this.notice('parked', slice, trans.__('Your GPU slice was lent to others'), [said])];
    }
    // A try that fails at once may be over before this page hears that it began.
    const isNews = !before.wake_error || slice.wake_failed_at !== before.wake_failed_at;
    if (slice.wake_error && isNews && this.openPath(slice.kernel_id) !== null) {
      const title = trans.__('Your kernel could not be woken');
      return [this.notice('notWoken', slice, title, [slice.wake_error])];
    }
    const isOver = before.state !== 'none' && slice.state === 'none';
    if (isOver && slice.end_reason !== null && !OWN_ENDS.includes(slice.end_reason)) {
      const said = slice.end_message || slice.message;
      return [this.notice('ended', slice, trans.__('Your GPU slice is gone'), [said])];
    }
    return [];
  }

  private left(slice: ISlice): INotice[] {
    const id = slice.kernel_id;
    const path = this.openPath(id);
    if (!slice.left_kernel || this.offered.has(id) || path === null) {
      return [];
    }
    this.offered.add(id);
    const title = this.trans.__('Your kernel %1 is here', slice.left_kernel);
    // The server learns a moment later which notebook it is of.
    return [this.notice('left', { ...slice, notebook: path }, title, [])];
  }

  private ending(slice: ISlice, now: number): INotice[] {
    const at = endsAt(slice, now);
    const told = this.told.get(slice.kernel_id);
    if (at === null || at <= now) {
      return [];
    }
    // It may end a little later each time that something runs.
    if (told !== undefined && Math.abs(told - at) < 60) {
      return [];
    }
    this.told.set(slice.kernel_id, at);
    const title = this.trans.__('Your GPU slice ends in %1', duration(at - now, this.trans));
    const why =
      at === slice.ends_at
        ? this.trans.__('Save what you need: the kernel ends with it.')
        : this.trans.__('The kernel is idle. Run a cell, or keep the slice, to go on.');
    return [this.notice('ending', slice, title, [why, slice.message])];
  }

  private notice(kind: Kind, slice: ISlice, title: string, text: string[]): INotice {
    return {
      kind,
      kernelId: slice.kernel_id,
      about: about(slice),
      title,
      text: text.filter(Boolean).join(' '),
      isWarning: ['ending', 'ended', 'notWoken'].includes(kind)
    };
  }

  private forget(state: IState | null): void {
    this.before = new Map(state?.slices.map(each => [each.kernel_id, each]));
    for (const known of [this.since, this.told, this.offered]) {
      for (const kernelId of known.keys()) {
        if (!this.before.has(kernelId)) {
          known.delete(kernelId);
        }
      }
    }
  }

  private before = new Map<string, ISlice>();
  /** Since when a kernel waits. */
  private readonly since = new Map<string, number>();
  /** Which end a kernel's person was told of. */
  private readonly told = new Map<string, number>();
  /** Which kernels that another server has left were told of. */
  private readonly offered = new Set<string>();
}
