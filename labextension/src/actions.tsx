import { Dialog, showDialog } from '@jupyterlab/apputils';
import { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { ApiError } from './api';
import { ISlice } from './contract';
import { answered, IOutcome, isOutdated, refused, startFresh } from './outcomes';
import {
  about,
  Action,
  cost,
  duration,
  keepChoices,
  losesVariables,
  sizeInSentence,
  sizeName
} from './texts';
import { ISlices } from './tokens';

interface IProps {
  slice: ISlice;
  /** Other kernels, which are idle, and whose slices it might have. */
  others: ISlice[];
  slices: ISlices;
  /** Restarts the kernel; false where nothing that is open has it any more. */
  restart: () => Promise<boolean>;
  trans: TranslationBundle;
}

/** What may be done with a slice now, each with what it costs. */
export function Actions({ slice, others, slices, restart, trans }: IProps): JSX.Element {
  const [outcome, setOutcome] = React.useState<IOutcome | null>(null);
  const [isBusy, setBusy] = React.useState(false);
  const latest = React.useRef(slice);
  latest.current = slice;
  const id = slice.kernel_id;
  const offered = slice.actions;
  const waits = ['waiting', 'resuming', 'parked', 'asleep'].includes(slice.state);
  React.useEffect(() => {
    if (!outcome) {
      return;
    }
    const timer = window.setTimeout(() => setOutcome(null), outcome.shownFor);
    return () => window.clearTimeout(timer);
  }, [outcome]);
  React.useEffect(() => {
    if (outcome && isOutdated(outcome, slice)) {
      setOutcome(null);
    }
  }, [outcome, slice.state]);

  const act = async (
    action: Action,
    label: string,
    call: () => Promise<string>,
    of: ISlice = slice
  ): Promise<void> => {
    if (losesVariables(of, action) && !(await isConfirmed(of, action, label, trans))) {
      return;
    }
    // While it was confirmed, the slice may have changed.
    const then = of === slice ? latest.current : of;
    setBusy(true);
    setOutcome(null);
    try {
      setOutcome(answered(await call(), action, then));
    } catch (error) {
      setOutcome(refused(words(error)));
    }
    setBusy(false);
  };
  const resize = async (size: string): Promise<string> =>
    (await slices.resize(id, size, false)).message;
  const restartOn = async (size: string): Promise<string> => {
    const { granted, message } = await slices.resize(id, size, true);
    // Whoever cannot have it keeps the variables.
    if (!granted) {
      throw new Error(message);
    }
    return (await restart())
      ? trans.__('The kernel was restarted on %1.', sizeInSentence(size, trans))
      : message;
  };
  const row = (
    action: Action,
    label: string,
    call: (choice: string) => Promise<string>,
    choice?: IChoice
  ): JSX.Element => (
    <ActionRow
      key={action}
      name={`${action} ${id}`}
      label={label}
      cost={cost(slice, action, trans)}
      loses={losesVariables(slice, action)}
      choice={choice}
      isBusy={isBusy}
      act={chosen => void act(action, label, () => call(chosen))}
    />
  );
  const sizes = (all: string[]): IChoice => ({
    label: trans.__('Size'),
    options: all.map(size => [size, sizeName(size, trans)])
  });
  return (
    <div className="jp-GpuSlice-actions">
      <div role="status" className="jp-GpuSlice-outcome">
        {outcome && !outcome.isError && outcome.text}
      </div>
      <div role="alert" className="jp-GpuSlice-outcome jp-mod-act">
        {outcome?.isError && outcome.text}
      </div>
      {outcome && (
        <button type="button" className="jp-GpuSlice-button" onClick={() => setOutcome(null)}>
          {trans.__('Dismiss')}
        </button>
      )}
      {offered.keep &&
        keepChoices(offered.keep.at_most).length > 0 &&
        row('keep', trans.__('Keep'), seconds => slices.keep(id, Number(seconds)), {
          label: trans.__('For how long'),
          options: keepChoices(offered.keep.at_most).map(seconds => [
            String(seconds),
            duration(seconds, trans)
          ])
        })}
      {offered.resume &&
        row(
          'resume',
          slice.left_kernel ? trans.__('Continue') : trans.__('Take the slice again'),
          () => slices.resume(id)
        )}
      {(slice.left_kernel || slice.wake_error) &&
        row('start-fresh', trans.__('Start fresh'), () => startFresh(restart, trans))}
      {offered.resize?.sizes.length &&
        row('resize', trans.__('Change the size'), resize, sizes(offered.resize.sizes))}
      {offered.restart?.sizes.length &&
        row('restart', trans.__('Restart on this size'), restartOn, sizes(offered.restart.sizes))}
      {offered['give-back'] &&
        row(
          'give-back',
          offered['give-back'].shuts_down
            ? trans.__('Shut down and give back')
            : trans.__('Give back when idle'),
          () => slices.giveBack(id)
        )}
      {offered['leave-queue'] &&
        row('leave-queue', trans.__('Leave the queue'), () => slices.leaveQueue(id))}
      {waits &&
        others.map(other => {
          const label = giveBackLabel(other, trans);
          return (
            <ActionRow
              key={other.kernel_id}
              name={`other ${other.kernel_id}`}
              label={label}
              cost={otherCost(other, trans)}
              loses={losesVariables(other, 'give-back')}
              isBusy={isBusy}
              act={() =>
                void act('give-back', label, () => slices.giveBack(other.kernel_id), other)
              }
            />
          );
        })}
      <AskPermission slice={slice} trans={trans} />
    </div>
  );
}

/** What it costs to let another kernel give its slice. */
function otherCost(other: ISlice, trans: TranslationBundle): string {
  const size = sizeInSentence(other.size, trans);
  return losesVariables(other, 'give-back')
    ? trans.__('It is yours, idle, and holds %1. It ends: all its variables are lost.', size)
    : trans.__(
        'It is yours, idle, and holds %1. Its variables are kept; its next cell waits for a slice.',
        size
      );
}

/** "Give back the slice of one.ipynb". */
function giveBackLabel(slice: ISlice, trans: TranslationBundle): string {
  const name = about(slice).split('/').pop() ?? '';
  return slice.actions['give-back']?.shuts_down
    ? trans.__('Shut down %1', name)
    : trans.__('Give back the slice of %1', name);
}

interface IChoice {
  label: string;
  options: [string, string][];
}

interface IRowProps {
  name: string;
  label: string;
  cost: string;
  loses: boolean;
  choice?: IChoice;
  isBusy: boolean;
  act: (choice: string) => void;
}

/** A button, what it costs, and what there is to choose. */
function ActionRow({ name, label, cost, loses, choice, isBusy, act }: IRowProps): JSX.Element {
  const [chosen, choose] = React.useState('');
  const options = choice?.options ?? [];
  // What was chosen may not be offered any more.
  const value = options.some(([each]) => each === chosen) ? chosen : (options[0]?.[0] ?? '');
  return (
    <div className="jp-GpuSlice-action">
      {choice && (
        <select
          aria-label={`${label}: ${choice.label}`}
          value={value}
          onChange={event => choose(event.target.value)}
        >
          {options.map(([each, text]) => (
            <option key={each} value={each}>
              {text}
            </option>
          ))}
        </select>
      )}
      <button
        type="button"
        className={`jp-GpuSlice-button${loses ? ' jp-mod-loses' : ''}`}
        aria-describedby={`cost ${name}`.replace(/\W/g, '-')}
        aria-disabled={isBusy}
        onClick={() => !isBusy && act(value)}
      >
        {label}
      </button>
      <p id={`cost ${name}`.replace(/\W/g, '-')}>{cost}</p>
    </div>
  );
}

/** Browsers let a page tell of something outside of itself only after its person has said so to a click. */
function AskPermission({ slice, trans }: Pick<IProps, 'slice' | 'trans'>): JSX.Element | null {
  const [permission, setPermission] = React.useState(
    'Notification' in window ? Notification.permission : 'denied'
  );
  const waits = slice.state === 'waiting' || slice.state === 'resuming';
  if (permission !== 'default' || !waits) {
    return null;
  }
  return (
    <div className="jp-GpuSlice-action">
      <button
        type="button"
        className="jp-GpuSlice-button"
        onClick={() => void Notification.requestPermission().then(setPermission)}
      >
        {trans.__('Tell me outside of this page')}
      </button>
      <p>{trans.__('When the slice is here and you look at something else.')}</p>
    </div>
  );
}

export async function isConfirmed(
  slice: ISlice,
  action: Action,
  label: string,
  trans: TranslationBundle
): Promise<boolean> {
  const { button } = await showDialog({
    title: trans.__('%1?', label),
    body: `${about(slice)}: ${cost(slice, action, trans)}`,
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label })],
    defaultButton: 0
  });
  return button.accept;
}

export function words(error: unknown): string {
  if (error instanceof ApiError) {
    return [error.message, error.advice].filter(Boolean).join(' ');
  }
  return error instanceof Error ? error.message : String(error);
}
