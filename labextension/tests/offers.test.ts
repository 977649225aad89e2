import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { IOffer } from '../src/contract';
import { availability, differ, explanation, rank } from '../src/offers';
import { trans } from './support';

function offer(changes: Partial<IOffer> = {}): IOffer {
  return {
    size: '2%',
    milli: 20,
    memory_mib: null,
    free_now: 12,
    position: null,
    expected_wait: null,
    message: '',
    simulated: false,
    ...changes
  };
}

const full = (changes: Partial<IOffer> = {}): IOffer =>
  offer({ free_now: 0, position: 3, ...changes });

test('what is free now is told, and else how long the wait would be', () => {
  assert.equal(availability(offer(), trans), '12 free now');
  assert.equal(availability(full({ expected_wait: [200, 250] }), trans), 'about 3 to 4 min');
  assert.equal(availability(full({ expected_wait: [240, 245] }), trans), 'about 4 min');
  assert.equal(availability(full({ expected_wait: [0, 10] }), trans), 'about 1 min');
  assert.equal(availability(full({ expected_wait: [7000, 7500] }), trans), 'about 2 hours');
  assert.equal(availability(full({ expected_wait: [3600, 7500] }), trans), 'about 1 to 2 hours');
  assert.equal(availability(full(), trans), '3rd in the queue');
  assert.equal(availability(full({ position: 1 }), trans), 'none free now');
  assert.equal(availability(full({ position: null }), trans), 'none free now');
});

test('nothing is told of what is not known', () => {
  assert.equal(availability(undefined, trans), '');
  assert.equal(availability(offer({ free_now: null }), trans), '');
});

test('what would be refused is not available, and the tooltip says why', () => {
  const refused = offer({ message: 'The course is over.' });
  assert.equal(availability(refused, trans), 'not available');
  assert.equal(explanation('GPU 2%', refused, trans), 'GPU 2%\nnot available\nThe course is over.');
});

test('the tooltip names a simulated GPU', () => {
  const told = explanation('GPU 2%', offer({ simulated: true }), trans);
  assert.equal(told, 'GPU 2%\n12 free now\nThe GPU is simulated.');
  assert.equal(explanation('GPU 2%', undefined, trans), 'GPU 2%');
});

test('small slices stand before large ones, and what is not known last', () => {
  const sizes = [offer({ milli: 1000 }), undefined, offer({ milli: 100 }), offer({ milli: 20 })];
  const sorted = sizes.sort((a, b) => rank(a) - rank(b)).map(each => each?.milli);
  assert.deepEqual(sorted, [20, 100, 1000, undefined]);
  const [small, large] = [offer({ memory_mib: 500 }), offer({ memory_mib: 90_000 })];
  assert.ok(rank(small) < rank(large));
  assert.ok(rank(large) < rank(offer({ milli: 21 })));
});

test('before the pool has answered, sizes of kernelspecs decide', () => {
  const sizes = ['2%', '2%..10%', '12.5% model=V100', '2x50%', '1', '2', '4GiB', 'lots', ''];
  const ranks = sizes.map(size => rank(undefined, size));
  assert.deepEqual(ranks, [20, 20, 125, 1000, 1000, 2000, Infinity, Infinity, Infinity]);
  assert.equal(rank(offer(), '1'), 20);
});

test('a launcher is drawn again only for what has changed', () => {
  const offers = { kernels: { a: offer() }, message: '' };
  assert.ok(!differ(offers, { kernels: { a: offer() }, message: '' }));
  assert.ok(differ(offers, { kernels: { a: offer({ free_now: 11 }) }, message: '' }));
  assert.ok(differ(offers, null));
});
