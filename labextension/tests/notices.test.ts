import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { ISlice } from '../src/contract';
import { INotice, isCurrent, isNotice, mayWait, Notices } from '../src/notices';
import { NOW, slice, trans, waiting } from './support';

/** A page that hears of states, a second after each other unless told otherwise. */
class Page {
  open: string | null = null;
  notices = new Notices(
    trans,
    () => 10,
    () => this.open
  );
  now = NOW;

  hears(...slices: ISlice[]): INotice[] {
    this.now += 1;
    return this.notices.of({ slices, pools: [] }, this.now);
  }

  kinds(...slices: ISlice[]): string[] {
    return this.hears(...slices).map(each => each.kind);
  }
}

test('what was there before the page is no news', () => {
  assert.deepEqual(new Page().kinds(slice(), slice({ kernel_id: 'j', state: 'parked' })), []);
});

test('a slice that came after a long wait is told, once', () => {
  const page = new Page();
  page.hears(waiting({ requested_at: NOW - 60 }));
  const [told] = page.hears(slice({ state: 'starting' }));
  assert.equal(told.kind, 'arrived');
  assert.equal(told.title, 'Your GPU slice is here');
  assert.equal(told.text, '2%, after 1 min.');
  assert.equal(told.about, 'one.ipynb');
  assert.deepEqual(page.kinds(slice()), []);
});

test('a short wait is not worth telling', () => {
  const page = new Page();
  page.hears(waiting({ requested_at: NOW }));
  assert.deepEqual(page.kinds(slice()), []);
});

test('the wait of a parked kernel begins with its cell', () => {
  const page = new Page();
  page.hears(slice({ requested_at: NOW - 5000 }));
  page.hears(slice({ state: 'parked', requested_at: NOW - 5000 }));
  page.hears(waiting({ state: 'resuming', requested_at: NOW - 5000 }));
  assert.deepEqual(page.kinds(slice({ requested_at: NOW - 5000 })), []);
  page.hears(slice({ state: 'parked' }));
  page.hears(waiting({ state: 'resuming' }));
  page.now += 60;
  assert.deepEqual(page.kinds(slice()), ['arrived']);
});

test('who took it is said in the words of the pool', () => {
  const page = new Page();
  page.hears(slice());
  const [told] = page.hears(slice({ state: 'parked', message: 'Lent to ada.' }));
  assert.deepEqual([told.kind, told.text, told.isWarning], ['parked', 'Lent to ada.', false]);
  assert.deepEqual(page.kinds(slice({ state: 'parked', message: 'Lent to bob.' })), []);
});

test('who gave a slice back is not told that it was lent', () => {
  const page = new Page();
  page.hears(slice());
  assert.deepEqual(page.kinds(slice({ state: 'parked', given_back: true })), []);
});

test('what was told is taken away once it is not so any more', () => {
  const parked = slice({ state: 'parked' });
  assert.equal(isCurrent('parked', parked, NOW), true);
  assert.equal(isCurrent('parked', waiting({ state: 'resuming' }), NOW), true);
  assert.equal(isCurrent('parked', slice(), NOW), false);
  assert.equal(isCurrent('parked', null, NOW), false);
  assert.equal(isCurrent('ending', slice({ ends_at: NOW + 60 }), NOW), true);
  assert.equal(isCurrent('ending', slice({ ends_at: NOW + 7200 }), NOW), false);
  assert.equal(isCurrent('ended', null, NOW), true);
});

test('what a cell shows of a wait is known by its mark, and out of date without one', () => {
  assert.equal(isNotice({ metadata: { gpu_pool: { notice: 'waiting' } } }), true);
  for (const other of [null, {}, { metadata: null }, { metadata: { gpu_pool: 'waiting' } }]) {
    assert.equal(isNotice(other), false);
  }
  assert.equal(mayWait(waiting()), true);
  assert.equal(mayWait(waiting({ state: 'resuming' })), true);
  assert.equal(mayWait(slice({ state: 'starting' })), true);
  for (const over of [null, slice(), slice({ state: 'parked' }), slice({ state: 'none' })]) {
    assert.equal(mayWait(over), false);
  }
});

test('a slice that was taken away is told, and not one that was given back', () => {
  const page = new Page();
  page.hears(slice());
  const gone = { state: 'none', end_reason: 'revoked', end_message: 'By hopper.' } as const;
  const [told] = page.hears(slice(gone));
  assert.deepEqual([told.kind, told.text, told.isWarning], ['ended', 'By hopper.', true]);
  assert.deepEqual(page.kinds(slice(gone)), []);
  page.hears(slice());
  assert.deepEqual(page.kinds(slice({ state: 'none', end_reason: 'released' })), []);
  page.hears(slice());
  assert.deepEqual(page.kinds(), []);
});

test('the end is told before it comes, once for each end', () => {
  const page = new Page();
  const ends_at = NOW + 600;
  assert.match(page.hears(slice({ ends_at }))[0].title, /ends in 9 min/);
  assert.deepEqual(page.kinds(slice({ ends_at: ends_at + 20 })), []);
  assert.deepEqual(page.kinds(slice({ ends_at: ends_at + 7200 })), []);
  page.now += 7200;
  assert.deepEqual(page.kinds(slice({ ends_at: ends_at + 7200 })), ['ending']);
  assert.deepEqual(page.kinds(slice({ ends_at: page.now - 300 })), []);
});

test('a kernel that ends because it is idle is told how to go on', () => {
  const page = new Page();
  const idle = { gives_back_at: NOW + 60, ends_when_idle: true };
  assert.match(page.hears(slice(idle))[0].text, /Run a cell/);
});

test('an idle kernel is warned shortly before it ends, and not whenever a cell is over', () => {
  const page = new Page();
  const idle = { ends_when_idle: true, idle_limit: 900 };
  assert.deepEqual(page.kinds(slice({ ...idle, gives_back_at: NOW + 900 })), []);
  assert.deepEqual(page.kinds(slice({ ...idle, gives_back_at: NOW + 400 })), []);
  assert.deepEqual(page.kinds(slice({ ...idle, gives_back_at: NOW + 200 })), ['ending']);
  const short = { ends_when_idle: true, idle_limit: 60 };
  assert.deepEqual(new Page().kinds(slice({ ...short, gives_back_at: NOW + 30 })), []);
});

test('a state that is lost and comes back is no news', () => {
  const page = new Page();
  page.hears(waiting({ requested_at: NOW - 60 }));
  page.notices.of(null, page.now);
  assert.deepEqual(page.kinds(slice()), []);
});

test('who gives way to others is not notified each time', () => {
  const notices = new Notices(
    trans,
    () => 60,
    () => null
  );
  notices.of({ slices: [slice({ gives_way: true })], pools: [] }, NOW);
  const parked = slice({ state: 'parked', gives_way: true });
  assert.deepEqual(notices.of({ slices: [parked], pools: [] }, NOW), []);
});

test('why a kernel could not be woken is told to the page of its notebook each time that it was tried', () => {
  const page = new Page();
  page.open = 'two.ipynb';
  const waking = slice({ state: 'resuming' });
  const asleep = slice({
    state: 'asleep',
    wake_error: 'This kernel could not be woken: a file has gone.',
    wake_failed_at: NOW
  });
  for (const expected of [['notWoken'], ['notWoken']]) {
    assert.deepEqual(page.kinds(waking), []);
    const told = page.hears(asleep);
    assert.deepEqual(
      told.map(each => each.kind),
      expected
    );
    assert.deepEqual([told[0].text, told[0].isWarning], [asleep.wake_error, true]);
    assert.equal(isCurrent('notWoken', asleep, NOW), true);
    assert.deepEqual(page.kinds(asleep), []);
  }
  // Tried again, without a word of that between.
  assert.deepEqual(page.kinds({ ...asleep, wake_failed_at: NOW + 1 }), ['notWoken']);
  assert.equal(isCurrent('notWoken', waking, NOW), false);
  assert.equal(isCurrent('left', { ...asleep, left_kernel: 'from today' }, NOW), false);
  page.open = null;
  page.hears(waking);
  assert.deepEqual(page.kinds(asleep), []);
});

test('a kernel that another server has left is told once, to the page that opens its notebook', () => {
  const page = new Page();
  const left = slice({ state: 'asleep', left_kernel: 'from today 9:02 (3 variables, 40 MiB)' });
  assert.deepEqual(page.kinds(left), []);
  page.open = 'two.ipynb';
  const [told] = page.hears(left);
  assert.deepEqual([told.kind, told.about], ['left', 'two.ipynb']);
  assert.equal(told.title, 'Your kernel from today 9:02 (3 variables, 40 MiB) is here');
  assert.equal(isCurrent('left', left, NOW), true);
  assert.deepEqual(page.kinds(left), []);
  const wanted = slice({ state: 'asking', left_kernel: '' });
  assert.equal(isCurrent('left', wanted, NOW), false);
  assert.deepEqual(page.kinds(wanted), []);
  assert.deepEqual(page.kinds(left), []); // it could not be woken, and its cell says why
  assert.deepEqual(page.kinds(), []);
  assert.deepEqual(page.kinds(left), ['left']); // opened again
});
