/**
 * What the server extension answers, see its server/openapi.yaml.
 *
 * Times are Unix seconds, durations seconds, memory MiB.
 */

/** How firm a limit is: `none` means that use is only counted. */
export type Strength = 'hard' | 'cooperative' | 'none';

/**
 * Where a kernel is with its slice.
 *
 * - `asking`: the pool has not answered yet
 * - `waiting`: in the queue
 * - `starting`: the slice is there, the kernel is on its way
 * - `held`: the kernel runs on its slice
 * - `parked`: the slice was lent to others, the variables are kept
 * - `asleep`: as parked, and the kernel is on disk
 * - `resuming`: parked, and in the queue again
 * - `none`: the kernel gave up, or its slice is over
 */
export type SliceState =
  | 'asking'
  | 'waiting'
  | 'starting'
  | 'held'
  | 'parked'
  | 'asleep'
  | 'resuming'
  | 'none';

export interface IMemory {
  granted_mib: number;
  /** What may be used now, with the burst on top; null where that is what is granted, as in older servers. */
  allowed_mib?: number | null;
  /** The most that ever may be. */
  limit_mib?: number | null;
  /** null where it cannot be measured. */
  used_mib: number | null;
  strength: Strength;
  /** What enforces it, for instance "MPS". */
  by: string;
}

export interface ICompute {
  share: string;
  strength: Strength;
  by: string;
}

export interface IDevice {
  name: string;
  simulated: boolean;
}

/** What may be done with a slice now; what is missing cannot be done. */
export interface IActions {
  /** For so many seconds. */
  keep?: { at_most: number };
  resize?: { sizes: string[]; keeps_variables: boolean };
  restart?: { sizes: string[]; keeps_variables: boolean };
  'give-back'?: { keeps_variables: boolean; shuts_down: boolean };
  resume?: { keeps_variables: boolean };
  'leave-queue'?: { keeps_variables: boolean };
}

export interface ISlice {
  kernel_id: string;
  /** The name of the kernelspec. */
  kernel_name: string;
  display_name: string;
  /** The path of the session, if the kernel has one. */
  notebook: string | null;
  state: SliceState;
  size: string;
  /** The size that applies from the next restart. */
  pending_size: string | null;
  /** What the person should read now, perhaps nothing. */
  message: string;
  position: number | null;
  /** The soonest and the latest that is expected, in seconds. */
  expected_wait: [number, number] | null;
  requested_at: number | null;
  held_at: number | null;
  ends_at: number | null;
  /** The job of a batch system that it is in, such as "Slurm job 4711"; empty for none. */
  job: string;
  idle_since: number | null;
  idle_limit: number | null;
  gives_back_at: number | null;
  ends_when_idle: boolean;
  /** From when on it goes to somebody who waits, if nothing happens. */
  yields_at: number | null;
  kept_until: number | null;
  /** When the kernel goes to disk if nothing happens; missing in older servers. */
  sleeps_at?: number | null;
  asked_back: boolean;
  /** Whether it goes, or has gone, to somebody who waits while the kernel is idle. */
  gives_way: boolean;
  /** Since when the kernel is on disk, and the MiB that it takes there; missing in older servers. */
  asleep_since?: number | null;
  image_mib?: number | null;
  /** Which kernel another server has left for it, "from yesterday 18:02 (…)"; empty for none, missing in older servers. */
  left_kernel?: string;
  /** Why it could not be woken when that was tried last, and when; empty for nothing, missing in older servers. */
  wake_error?: string;
  wake_failed_at?: number | null;
  devices: IDevice[];
  node: string;
  memory: IMemory | null;
  compute: ICompute | null;
  end_reason: string | null;
  end_message: string;
  /** Whether it is parked because its person gave the slice back. */
  given_back: boolean;
  actions: IActions;
}

export interface IPool {
  url: string;
  reachable: boolean;
  simulated: boolean;
  message: string;
}

export interface IState {
  slices: ISlice[];
  pools: IPool[];
}

/** The last ten minutes, oldest first. */
export interface IMemoryHistory {
  samples: [number, number][];
  granted_mib: number;
}

/** A kernel of the launcher. */
export interface IOffer {
  size: string;
  /** Thousandths of one GPU. */
  milli: number;
  memory_mib: number | null;
  /** How many would be granted at once. */
  free_now: number | null;
  /** The position in the queue that a request would have now. */
  position: number | null;
  expected_wait: [number, number] | null;
  /** Why it would be refused. */
  message: string;
  simulated: boolean;
}

export interface IOffers {
  /** By the name of the kernelspec. */
  kernels: Record<string, IOffer>;
  message: string;
}

/** What a change of size came to. */
export interface IResized {
  granted: boolean;
  at_restart: boolean;
  message: string;
}
