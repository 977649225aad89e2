import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { detail, isIdle, listed, remedy, remedyLabel, title } from '../src/runningTexts';
import { NOW, slice, trans, waiting } from './support';

test('slices are listed by notebook, and what has none is not', () => {
  const all = [
    slice({ kernel_id: '1', notebook: 'two.ipynb' }),
    slice({ kernel_id: '2', notebook: 'one.ipynb' }),
    slice({ kernel_id: '3', state: 'none' }),
    waiting({ kernel_id: '4', notebook: null, display_name: 'Python 3 (GPU 2%)' })
  ];
  assert.deepEqual(
    listed(all).map(each => each.kernel_id),
    ['2', '4', '1']
  );
  assert.equal(all[0].kernel_id, '1');
});

test('a slice is called as its notebook, without the folder', () => {
  assert.equal(title(slice({ notebook: 'course/week 1/one.ipynb' })), 'one.ipynb');
  assert.equal(title(slice({ notebook: null })), 'Python 3 (GPU 2%)');
});

test('a slice is idle from a minute on, and only where it is held', () => {
  assert.ok(!isIdle(slice({ idle_since: NOW - 59 }), NOW));
  assert.ok(isIdle(slice({ idle_since: NOW - 60 }), NOW));
  assert.ok(!isIdle(slice({ idle_since: null }), NOW));
  assert.ok(!isIdle(slice({ state: 'parked', idle_since: NOW - 600 }), NOW));
});

test('the size stands once, and what matters first', () => {
  assert.equal(detail(slice(), NOW, trans), '2% · 512 of 655 MiB');
  assert.equal(
    detail(slice({ idle_since: NOW - 720 }), NOW, trans),
    'idle for 12 min · 2% · 512 of 655 MiB'
  );
  assert.equal(detail(waiting(), NOW, trans), '3rd in the queue · 2%');
  assert.equal(detail(slice({ state: 'parked' }), NOW, trans), 'parked · 2%');
});

test('the button gives back what is held, and leaves the queue else', () => {
  const keeps = { 'give-back': { keeps_variables: true, shuts_down: false } };
  const ends = { 'give-back': { keeps_variables: false, shuts_down: true } };
  const leaves = { 'leave-queue': { keeps_variables: true } };
  assert.equal(remedy(slice()), null);
  assert.equal(remedy(slice({ actions: keeps })), 'give-back');
  assert.equal(remedy(waiting({ actions: leaves })), 'leave-queue');
  assert.equal(remedyLabel(slice({ actions: keeps }), trans), 'Give back when idle');
  assert.equal(remedyLabel(slice({ actions: ends }), trans), 'Shut down and give back');
  assert.equal(remedyLabel(waiting({ actions: leaves }), trans), 'Leave the queue');
});
