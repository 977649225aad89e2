import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { answered, isOutdated, refused, startFresh } from '../src/outcomes';
import { slice, trans, waiting } from './support';

test('what was said of a slice is out of date once that is somewhere else', () => {
  const outcome = answered('Kept for 2 h.', 'keep', slice());
  assert.equal(isOutdated(outcome, slice()), false);
  assert.equal(isOutdated(outcome, slice({ state: 'parked' })), true);
});

test('what came of giving back the slice of another kernel is shown to who waits', () => {
  const outcome = answered(
    'It goes as soon as it is idle.',
    'give-back',
    slice({ kernel_id: 'b' })
  );
  assert.equal(isOutdated(outcome, waiting({ kernel_id: 'a' })), false);
  assert.equal(isOutdated(outcome, slice({ kernel_id: 'a', state: 'starting' })), false);
});

test('a restart goes through states of its own, and a refusal holds in each', () => {
  const asleep = slice({ state: 'asleep' });
  for (const outcome of [answered('Done.', 'start-fresh', asleep), refused('No.')]) {
    assert.equal(isOutdated(outcome, waiting()), false);
  }
  assert.ok(refused('No.').shownFor > answered('Done.', 'keep', asleep).shownFor);
});

test('nothing was started afresh where nothing that is open has the kernel any more', async () => {
  assert.equal(await startFresh(async () => true, trans), 'The kernel was started afresh.');
  await assert.rejects(
    startFresh(async () => false, trans),
    ({ message }: Error) =>
      message.startsWith('The kernel was not started afresh: ') && message.length <= 140
  );
});
