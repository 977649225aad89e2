/** What came of something that was done with a slice, and for how long it is shown. Pure. */

import { ISlice, SliceState } from './contract';
import type { Action, Words } from './texts';

/** Milliseconds for which an answer is shown, and for which it is if it is a refusal. */
const READ = 20_000;
const READ_REFUSAL = 120_000;

export interface IOutcome {
  text: string;
  isError: boolean;
  /** Milliseconds for which it is shown at most. */
  shownFor: number;
  /** The slice's kernel, and where that was then: it is out of date once that is somewhere else. */
  of: { kernelId: string; state: SliceState } | null;
}

/** The answer to an action; `slice` is what it was done with, as it was then. */
export function answered(text: string, action: Action, slice: ISlice): IOutcome {
  // A restart goes through states of its own.
  const restarts = action === 'restart' || action === 'start-fresh';
  const of = restarts ? null : { kernelId: slice.kernel_id, state: slice.state };
  return { text, isError: false, shownFor: READ, of };
}

export function refused(text: string): IOutcome {
  return { text, isError: true, shownFor: READ_REFUSAL, of: null };
}

/** Whether what was said is out of date; of another kernel's slice, `slice` says nothing. */
export function isOutdated({ of }: IOutcome, slice: ISlice): boolean {
  return of !== null && of.kernelId === slice.kernel_id && of.state !== slice.state;
}

/** Start a kernel afresh by `restart`, which returns false where there is none any more; return what to say. */
export async function startFresh(restart: () => Promise<boolean>, trans: Words): Promise<string> {
  if (!(await restart())) {
    // JupyterLab shows 140 characters.
    throw new Error(
      trans.__(
        'The kernel was not started afresh: it has ended, or is not open here any more. Open its notebook, and look again.'
      )
    );
  }
  return trans.__('The kernel was started afresh.');
}
