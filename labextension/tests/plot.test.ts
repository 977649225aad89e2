import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { appended, joined, level, path, Sample, SPAN } from '../src/plot';
import { NOW } from './support';

test('no samples, no line', () => {
  assert.equal(path([], 655, NOW, 100, 50), '');
});

test('use holds until the next sample, and the last until now', () => {
  const samples: Sample[] = [
    [NOW - SPAN, 0],
    [NOW - SPAN / 2, 655]
  ];
  assert.equal(path(samples, 655, NOW, 100, 50), 'M0,50 L50,50 L50,0 L100,0');
});

test('what is older begins at the edge, and more than was granted fits', () => {
  assert.equal(path([[NOW - 2 * SPAN, 100]], 50, NOW, 100, 50), 'M0,0 L100,0');
  assert.equal(level(50, [[NOW - 2 * SPAN, 100]], 50, 50), 25);
  assert.equal(level(50, [[NOW, 10]], 50, 50), 0);
});

test('only ten minutes are kept, and one sample of a moment', () => {
  const samples = appended(
    [
      [NOW - SPAN - 1, 1],
      [NOW - 5, 2],
      [NOW - 0.1, 3]
    ],
    [NOW, 4]
  );
  assert.deepEqual(samples, [
    [NOW - 5, 2],
    [NOW, 4]
  ]);
});

test('what was seen before the history came is not lost', () => {
  const history: Sample[] = [
    [NOW - 60, 1],
    [NOW - 0.2, 2]
  ];
  assert.deepEqual(joined(history, [[NOW, 3]]), [
    [NOW - 60, 1],
    [NOW, 3]
  ]);
});
