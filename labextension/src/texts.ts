/** What people read of a slice. Pure: values in, words out. */

import type { TranslationBundle } from '@jupyterlab/translation';

import { IMemory, ISlice, Strength } from './contract';

export type Words = Pick<TranslationBundle, '__' | '_n'>;

/** From so many seconds before a slice ends it is told so. */
export const ENDS_SOON = 15 * 60;
/** The same where it ends since its kernel is idle, as it is between any two cells; at most a third of that time. */
const IDLE_ENDS_SOON = 5 * 60;
/** From this part of its memory on, a kernel is about to run out of it. */
const NEARLY_FULL = 0.95;
/** MiB from which memory is told in GiB, as %gpu does it. */
const GIB = 1024;

const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

/** "less than a minute", "12 min", "1 h 30 min", "3 days". */
export function duration(seconds: number, trans: Words): string {
  if (seconds < MINUTE) {
    return trans.__('less than a minute');
  }
  if (seconds < 2 * HOUR) {
    return trans._n('%1 min', '%1 min', Math.floor(seconds / MINUTE));
  }
  if (seconds < 2 * DAY) {
    const hours = Math.floor(seconds / HOUR);
    const minutes = Math.floor((seconds % HOUR) / MINUTE);
    return minutes && hours < 10
      ? trans.__('%1 h %2 min', hours, minutes)
      : trans._n('%1 h', '%1 h', hours);
  }
  return trans._n('%1 day', '%1 days', Math.floor(seconds / DAY));
}

/** "perhaps 4 min", "perhaps 4 to 12 min"; empty where nothing is known. */
export function wait(expected: [number, number] | null, trans: Words): string {
  if (!expected) {
    return '';
  }
  const [soonest, latest] = expected.map(each => Math.max(1, Math.round(each / MINUTE)));
  if (latest > 120) {
    const [from, to] = expected.map(each => Math.max(1, Math.round(each / HOUR)));
    return from === to
      ? trans._n('perhaps %1 hour', 'perhaps %1 hours', to)
      : trans.__('perhaps %1 to %2 hours', from, to);
  }
  return soonest === latest
    ? trans._n('perhaps %1 min', 'perhaps %1 min', latest)
    : trans.__('perhaps %1 to %2 min', soonest, latest);
}

/** "next in the queue", "3rd in the queue"; "in the queue" where the position is not known. */
export function place(position: number | null, trans: Words): string {
  if (position === null) {
    return trans.__('in the queue');
  }
  if (position <= 1) {
    return trans.__('next in the queue');
  }
  const last = position % 100 > 10 && position % 100 < 14 ? 0 : position % 10;
  switch (last) {
    case 1:
      return trans.__('%1st in the queue', position);
    case 2:
      return trans.__('%1nd in the queue', position);
    case 3:
      return trans.__('%1rd in the queue', position);
    default:
      return trans.__('%1th in the queue', position);
  }
}

/** "512 of 655 MiB", "655 MiB" where use is not measured; from 1 GiB on "1.2 of 3.2 GiB". */
export function memory(used: number | null, granted: number, trans: Words): string {
  const [unit, digits] = granted >= GIB ? [GIB, 1] : [1, 0];
  const [has, all] = [used ?? 0, granted].map(each => trim((each / unit).toFixed(digits)));
  if (unit === 1) {
    return used === null ? trans.__('%1 MiB', all) : trans.__('%1 of %2 MiB', has, all);
  }
  return used === null ? trans.__('%1 GiB', all) : trans.__('%1 of %2 GiB', has, all);
}

/** "512 of 655 MiB, now up to 2 GiB": what is granted, and what may be used now. */
export function memoryNow(slice: IMemory, trans: Words): string {
  const granted = memory(slice.used_mib, slice.granted_mib, trans);
  const allowed = slice.allowed_mib ?? null;
  return allowed === null || allowed <= slice.granted_mib
    ? granted
    : trans.__('%1, now up to %2', granted, memory(null, allowed, trans));
}

function trim(number: string): string {
  return number.replace(/\.0$/, '');
}

/** A size, "2%" or "2%, up to 10%"; of whole GPUs, which are asked for by a bare number, "whole GPU". */
export function sizeName(size: string, trans: Words): string {
  const [guarantee, limit] = size.split('..');
  if (limit) {
    return trans.__('%1, up to %2', guarantee, limit);
  }
  if (!/^\d+$/.test(size)) {
    return size;
  }
  return size === '1' ? trans.__('whole GPU') : trans.__('%1 whole GPUs', size);
}

/** The same in a sentence: "2%", "a whole GPU", "4 whole GPUs". */
export function sizeInSentence(size: string, trans: Words): string {
  return size === '1' ? trans.__('a whole GPU') : sizeName(size, trans);
}

/** What a kernel is called, whose kernelspec tells the size that it was started with, now that it has a slice. */
export function nameOnSize(name: string, slice: ISlice | null): string {
  const isSame = slice === null || name.replace(/ +/g, ' ') === slice.display_name;
  return isSame ? name : slice.display_name;
}

/** When a held slice ends, or null where that is not near. */
export function endsAt(slice: ISlice, now: number): number | null {
  const near: number[] = [];
  const holds = slice.state === 'held' || slice.state === 'starting';
  if (holds && slice.ends_at !== null && slice.ends_at - now <= ENDS_SOON) {
    near.push(slice.ends_at);
  }
  if (slice.state === 'held' && slice.ends_when_idle && slice.gives_back_at !== null) {
    const soon = Math.min(IDLE_ENDS_SOON, (slice.idle_limit ?? Infinity) / 3);
    if (slice.gives_back_at - now <= soon) {
      near.push(slice.gives_back_at);
    }
  }
  return near.length ? Math.min(...near) : null;
}

/** What stands in the status bar: "2% · 512 of 655 MiB", "3rd in the queue, perhaps 4 min". */
export function status(slice: ISlice, now: number, trans: Words): string {
  switch (slice.state) {
    case 'asking':
      return trans.__('asking the GPU pool');
    case 'waiting':
      return queue(slice, trans);
    case 'starting':
      return trans.__('%1 · kernel starts', sizeName(slice.size, trans));
    case 'held':
      return held(slice, now, trans);
    case 'parked':
      return trans.__('parked');
    case 'asleep':
      return trans.__('asleep');
    case 'resuming':
      return trans.__('parked, %1', queue(slice, trans));
    case 'none':
      return trans.__('no GPU slice');
  }
}

function queue(slice: ISlice, trans: Words): string {
  const expected = wait(slice.expected_wait, trans);
  const where = place(slice.position, trans);
  return expected ? trans.__('%1, %2', where, expected) : where;
}

function held(slice: ISlice, now: number, trans: Words): string {
  const ends = endsAt(slice, now);
  const size = sizeName(slice.size, trans);
  if (ends !== null) {
    return trans.__('%1 · ends in %2', size, duration(ends - now, trans));
  }
  if (slice.gives_way) {
    return trans.__('%1 · idle, giving way', size);
  }
  if (slice.asked_back) {
    return trans.__('%1 · asked back', size);
  }
  const { used_mib, granted_mib } = slice.memory ?? { used_mib: null, granted_mib: 0 };
  const allowed = slice.memory?.allowed_mib ?? granted_mib;
  return granted_mib ? trans.__('%1 · %2', size, memory(used_mib, allowed, trans)) : size;
}

/** Whether the person should do something now. */
export function needsAction(slice: ISlice, now: number): boolean {
  if (slice.state === 'none') {
    return Boolean(slice.end_reason || slice.end_message || slice.message);
  }
  return (
    slice.state === 'held' &&
    (endsAt(slice, now) !== null || slice.asked_back || isNearlyFull(slice))
  );
}

function isNearlyFull(slice: ISlice): boolean {
  const { used_mib, granted_mib } = slice.memory ?? { used_mib: null, granted_mib: 0 };
  const allowed = slice.memory?.allowed_mib ?? granted_mib;
  return granted_mib > 0 && (used_mib ?? 0) >= NEARLY_FULL * allowed;
}

/**
 * Which notebook or kernel a slice is of: a session that has no file yet has a made-up path.
 *
 * `here` is the path of what is in front and uses it, since several may.
 */
export function about(slice: ISlice, here: string | null = null): string {
  const path = here ?? slice.notebook;
  const isNamed = path && !/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/.test(path);
  return isNamed ? path : slice.display_name;
}

/** For how many seconds a slice may be kept, of what can be chosen; the most that is allowed is the last. */
export function keepChoices(atMost: number): number[] {
  const usual = [HOUR / 2, HOUR, 2 * HOUR, 4 * HOUR].filter(each => each <= atMost);
  const most = Math.min(atMost, 4 * HOUR);
  return most < MINUTE || usual.includes(most) ? usual : [...usual, most];
}

/** Other kernels of this server that hold a slice and do nothing, largest first as they come. */
export function idleOthers(slice: ISlice, all: ISlice[]): ISlice[] {
  return all.filter(
    each =>
      each.kernel_id !== slice.kernel_id &&
      each.state === 'held' &&
      each.idle_since !== null &&
      'give-back' in each.actions
  );
}

/** What is said aloud by a screen reader when it changes: without what changes all the time. */
export function announcement(slice: ISlice | null, now: number, trans: Words): string {
  if (!slice) {
    return '';
  }
  if (slice.state === 'held' && endsAt(slice, now) === null) {
    return trans.__('GPU slice: %1', sizeName(slice.size, trans));
  }
  const still = { ...slice, expected_wait: null };
  if (slice.state === 'held') {
    return trans.__('GPU slice: %1, ends soon', sizeName(slice.size, trans));
  }
  return trans.__('GPU slice: %1', status(still, now, trans));
}

/** How firm a limit is. */
export function firmness(strength: Strength, by: string, trans: Words): string {
  switch (strength) {
    case 'hard':
      return trans.__('hard: programs cannot use more (%1)', by);
    case 'cooperative':
      return trans.__('cooperative: kept by %1; other programs can use more', by);
    case 'none':
      return trans.__('none (%1): nothing stops a program from using more', by);
  }
}

/** The devices of a slice, and where they are. */
export function devices(slice: ISlice, trans: Words): string {
  const names = slice.devices.map(each =>
    each.simulated ? trans.__('%1 (simulated)', each.name) : each.name
  );
  const counted = [...new Set(names)].map(name => {
    const count = names.filter(each => each === name).length;
    return count > 1 ? trans.__('%1 × %2', count, name) : name;
  });
  const all = counted.join(', ');
  return slice.node ? trans.__('%1 on %2', all, slice.node) : all;
}

export interface IRow {
  label: string;
  value: string;
}

/** What the panel lists of a slice. */
export function rows(slice: ISlice, now: number, trans: Words): IRow[] {
  const found: IRow[] = [];
  const row = (label: string, value: string): void => {
    found.push({ label, value });
  };
  if (slice.devices.length) {
    row(trans.__('Device'), devices(slice, trans));
  }
  if (slice.job) {
    row(trans.__('Job'), slice.job);
  }
  if (slice.memory && slice.devices.length && !slice.memory.granted_mib) {
    row(trans.__('Memory'), trans.__('not known'));
  }
  if (slice.memory?.granted_mib) {
    const { strength, by } = slice.memory;
    row(trans.__('Memory'), memoryNow(slice.memory, trans));
    if (slice.memory.limit_mib) {
      const most = memory(null, slice.memory.limit_mib, trans);
      row(trans.__('At most'), trans.__('%1 while nobody else needs that', most));
    }
    row(trans.__('Memory limit'), firmness(strength, by, trans));
  }
  if (slice.compute?.share) {
    row(trans.__('Compute'), slice.compute.share);
    row(trans.__('Compute limit'), firmness(slice.compute.strength, slice.compute.by, trans));
  }
  if (slice.pending_size) {
    row(trans.__('After a restart'), sizeName(slice.pending_size, trans));
  }
  if (slice.image_mib) {
    row(trans.__('On disk'), memory(null, slice.image_mib, trans));
  }
  return [...found, ...times(slice, now, trans)];
}

function times(slice: ISlice, now: number, trans: Words): IRow[] {
  const since = (at: number): string => duration(Math.max(0, now - at), trans);
  const until = (at: number): string => duration(Math.max(0, at - now), trans);
  const from = (at: number): string =>
    at > now ? trans.__('in %1, sooner if they have waited', until(at)) : trans.__('at any time');
  const waits = slice.state === 'waiting' || slice.state === 'resuming';
  const ends = slice.ends_when_idle ? trans.__('If idle, ends in') : trans.__('If idle, lent in');
  const all: [string, number | null, (at: number) => string][] = [
    [trans.__('Waiting for'), waits ? slice.requested_at : null, since],
    [trans.__('Held for'), slice.held_at, since],
    [trans.__('Time left'), slice.held_at === null ? null : slice.ends_at, until],
    [trans.__('Idle for'), slice.idle_since, since],
    [trans.__('Asleep for'), slice.asleep_since ?? null, since],
    [trans.__('Lent if somebody waits'), slice.yields_at, from],
    [ends, slice.gives_back_at, until],
    [trans.__('If idle, to disk in'), slice.sleeps_at ?? null, until],
    [trans.__('Kept for'), slice.kept_until, until]
  ];
  return all.flatMap(([label, at, told]) => (at === null ? [] : [{ label, value: told(at) }]));
}

/** Said while changes do not arrive. */
export function stale(trans: Words): string {
  return trans.__('The server does not answer. This is what was known last.');
}

export type Action =
  | 'keep'
  | 'resize'
  | 'restart'
  | 'start-fresh'
  | 'give-back'
  | 'resume'
  | 'leave-queue';

/** Whether an action loses the variables, so that it needs to be confirmed. */
export function losesVariables(slice: ISlice, action: Action): boolean {
  if (action === 'start-fresh') {
    return true;
  }
  const offered = slice.actions[action];
  return offered !== undefined && 'keeps_variables' in offered && !offered.keeps_variables;
}

/** What an action costs. */
export function cost(slice: ISlice, action: Action, trans: Words): string {
  const loses = losesVariables(slice, action);
  switch (action) {
    case 'keep':
      return trans.__(
        'Variables are kept, and the slice is not lent to others while you are away.'
      );
    case 'resize':
      if (slice.state === 'none') {
        return trans.__('The next cell asks for a slice of this size.');
      }
      return loses ? trans.__('All variables are lost.') : trans.__('Variables are kept.');
    case 'restart':
      return trans.__(
        'If this size is free now, the kernel starts anew on it: all variables are lost. If not, nothing happens.'
      );
    case 'start-fresh':
      return trans.__('The kernel starts anew: all variables are lost, on disk, too.');
    case 'resume':
      return trans.__('Variables are kept. Running a cell does the same.');
    case 'give-back':
      if (slice.actions['give-back']?.shuts_down) {
        return trans.__('The kernel is shut down: all variables are lost.');
      }
      return loses
        ? trans.__('The kernel ends as soon as it is idle: all variables are lost.')
        : trans.__(
            'As soon as the kernel is idle. Variables are kept; the next cell waits for a slice.'
          );
    case 'leave-queue':
      return slice.state === 'resuming'
        ? trans.__('Cells that wait end with an error. Variables are kept.')
        : trans.__('Cells that wait end with an error. The next cell joins the queue at its end.');
  }
}
