/** What the Running panel says of a slice. Pure: values in, words out. */

import { ISlice } from './contract';
import { about, Action, duration, sizeName, status, Words } from './texts';

/** Seconds without work from which a slice counts as idle. */
const IDLE_FROM = 60;

/** The slices that are listed: what was given up or is over has none. */
export function listed(slices: ISlice[]): ISlice[] {
  const name = (each: ISlice): string => each.notebook ?? each.display_name;
  return slices
    .filter(each => each.state !== 'none')
    .sort((a, b) => name(a).localeCompare(name(b)) || a.kernel_id.localeCompare(b.kernel_id));
}

export function title(slice: ISlice): string {
  return about(slice).split('/').pop() || slice.display_name;
}

export function isIdle(slice: ISlice, now: number): boolean {
  return slice.state === 'held' && slice.idle_since !== null && now - slice.idle_since >= IDLE_FROM;
}

/** "2% · 512 of 655 MiB", "idle for 12 min · 2% · …", "3rd in the queue · 2%": first what is seen of it. */
export function detail(slice: ISlice, now: number, trans: Words): string {
  const told = status(slice, now, trans);
  const size = sizeName(slice.size, trans);
  const text = told.startsWith(size) ? told : trans.__('%1 · %2', told, size);
  return isIdle(slice, now)
    ? trans.__('idle for %1 · %2', duration(now - (slice.idle_since ?? now), trans), text)
    : text;
}

/** What the button of a slice does, null where it can do nothing. */
export function remedy(slice: ISlice): Action | null {
  const actions: Action[] = ['give-back', 'leave-queue'];
  return actions.find(each => each in slice.actions) ?? null;
}

/** What that button is called. */
export function remedyLabel(slice: ISlice, trans: Words): string {
  if (remedy(slice) === 'leave-queue') {
    return trans.__('Leave the queue');
  }
  return slice.actions['give-back']?.shuts_down
    ? trans.__('Shut down and give back')
    : trans.__('Give back when idle');
}
