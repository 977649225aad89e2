import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { ISlice } from '../src/contract';
import * as texts from '../src/texts';
import { NOW, slice, trans, waiting } from './support';

function table<T>(name: string, told: (given: T) => unknown, cases: [T, unknown][]): void {
  test(name, () => {
    for (const [given, expected] of cases) {
      assert.deepEqual(told(given), expected, JSON.stringify(given));
    }
  });
}

const status = (given: ISlice): string => texts.status(given, NOW, trans);

table('durations', seconds => texts.duration(seconds, trans), [
  [-5, 'less than a minute'],
  [59.9, 'less than a minute'],
  [60, '1 min'],
  [7199, '119 min'],
  [7200, '2 h'],
  [9000, '2 h 30 min'],
  [36_000 + 1800, '10 h'],
  [2 * 86_400, '2 days']
]);

table<[number, number] | null>('expected waits', expected => texts.wait(expected, trans), [
  [null, ''],
  [[0, 0], 'perhaps 1 min'],
  [[230, 250], 'perhaps 4 min'],
  [[240, 720], 'perhaps 4 to 12 min'],
  [[3600, 7300], 'perhaps 1 to 2 hours'],
  [[7200, 7300], 'perhaps 2 hours']
]);

table<number | null>('positions', position => texts.place(position, trans).split(' ')[0], [
  [null, 'in'],
  [1, 'next'],
  [2, '2nd'],
  [3, '3rd'],
  [4, '4th'],
  [11, '11th'],
  [12, '12th'],
  [13, '13th'],
  [21, '21st'],
  [111, '111th'],
  [122, '122nd']
]);

table<string>('sizes in a sentence', size => texts.sizeInSentence(size, trans), [
  ['2%', '2%'],
  ['2%..10%', '2%, up to 10%'],
  ['2x1GiB..4GiB', '2x1GiB, up to 4GiB'],
  ['1', 'a whole GPU'],
  ['4', '4 whole GPUs']
]);

table<[string, ISlice | null]>('names of kernels', ([name, of]) => texts.nameOnSize(name, of), [
  [['Python 3 (GPU 2%)', null], 'Python 3 (GPU 2%)'],
  [['Python 3 (GPU 2%)', slice()], 'Python 3 (GPU 2%)'],
  [['Python 3 (GPU  2%)', slice()], 'Python 3 (GPU  2%)'],
  [
    ['Python 3 (GPU 2%)', slice({ display_name: 'Python 3 (GPU 10%)', size: '10%' })],
    'Python 3 (GPU 10%)'
  ]
]);

table<[number | null, number]>('memory', ([used, all]) => texts.memory(used, all, trans), [
  [[512, 655], '512 of 655 MiB'],
  [[null, 655], '655 MiB'],
  [[0, 655], '0 of 655 MiB'],
  [[1229, 16_384], '1.2 of 16 GiB'],
  [[null, 32_768], '32 GiB'],
  [[null, 1023], '1023 MiB'],
  [[512, 1024], '0.5 of 1 GiB'],
  [[null, 3276], '3.2 GiB']
]);

table('the status bar', status, [
  [slice(), '2% · 512 of 655 MiB'],
  [slice({ memory: null }), '2%'],
  [slice({ memory: null, size: '1' }), 'whole GPU'],
  [slice({ memory: null, size: '2' }), '2 whole GPUs'],
  [slice({ state: 'asking' }), 'asking the GPU pool'],
  [waiting({ expected_wait: [230, 250] }), '3rd in the queue, perhaps 4 min'],
  [waiting({ position: null }), 'in the queue'],
  [slice({ state: 'starting' }), '2% · kernel starts'],
  [slice({ state: 'parked', position: 3 }), 'parked'],
  [waiting({ state: 'resuming', position: 1 }), 'parked, next in the queue'],
  [slice({ ends_at: NOW + 12 * 60 + 5 }), '2% · ends in 12 min'],
  [slice({ ends_at: NOW + texts.ENDS_SOON + 1 }), '2% · 512 of 655 MiB'],
  [slice({ ends_at: NOW - 1 }), '2% · ends in less than a minute'],
  [slice({ gives_back_at: NOW + 60 }), '2% · 512 of 655 MiB'],
  [slice({ gives_back_at: NOW + 60, ends_when_idle: true }), '2% · ends in 1 min'],
  [slice({ asked_back: true }), '2% · asked back'],
  [slice({ gives_way: true }), '2% · idle, giving way'],
  [slice({ state: 'parked', gives_way: true }), 'parked'],
  [slice({ state: 'asleep' }), 'asleep'],
  [slice({ state: 'none' }), 'no GPU slice'],
  [waiting({ ends_at: NOW + 60, position: 2 }), '2nd in the queue']
]);

const full = { granted_mib: 655, used_mib: 623, strength: 'hard', by: 'MPS' } as const;

table<ISlice>('a colour only where somebody should act', each => texts.needsAction(each, NOW), [
  [slice(), false],
  [waiting(), false],
  [slice({ state: 'parked' }), false],
  [slice({ ends_at: NOW + 60 }), true],
  [slice({ gives_back_at: NOW + 60 }), false],
  [slice({ gives_back_at: NOW + 60, ends_when_idle: true }), true],
  [slice({ asked_back: true }), true],
  [slice({ gives_way: true }), false],
  [slice({ memory: full }), true],
  [slice({ memory: { ...full, used_mib: 622 } }), false],
  [slice({ memory: { ...full, allowed_mib: 2048, limit_mib: 3276 } }), false],
  [slice({ state: 'none' }), false],
  [slice({ state: 'none', end_reason: 'revoked' }), true],
  [slice({ state: 'none', message: 'It gave up.' }), true]
]);

test('what may be used on top is told beside what is granted', () => {
  const burst = { ...full, allowed_mib: 2048, limit_mib: 3276 };
  assert.equal(texts.memoryNow(burst, trans), '623 of 655 MiB, now up to 2 GiB');
  assert.equal(texts.memoryNow({ ...burst, used_mib: null }, trans), '655 MiB, now up to 2 GiB');
  assert.equal(texts.memoryNow(full, trans), '623 of 655 MiB');
  assert.equal(texts.memoryNow({ ...burst, allowed_mib: 655 }, trans), '623 of 655 MiB');
  assert.deepEqual(
    texts
      .rows(slice({ memory: burst }), NOW, trans)
      .slice(1, 3)
      .map(each => `${each.label}: ${each.value}`),
    ['Memory: 623 of 655 MiB, now up to 2 GiB', 'At most: 3.2 GiB while nobody else needs that']
  );
});

test('of a kernel on disk it is told since when, and what it takes there', () => {
  const asleep = slice({
    state: 'asleep',
    memory: null,
    compute: null,
    devices: [],
    held_at: null
  });
  const told = texts.rows({ ...asleep, asleep_since: NOW - 7200, image_mib: 320 }, NOW, trans);
  assert.deepEqual(
    told.map(each => `${each.label}: ${each.value}`),
    ['On disk: 320 MiB', 'Asleep for: 2 h']
  );
});

test('of an idle kernel it is told when it goes to disk', () => {
  const idle = slice({ idle_since: NOW - 600, sleeps_at: NOW + 6600 });
  const told = texts.rows(idle, NOW, trans).map(each => `${each.label}: ${each.value}`);
  assert.ok(told.includes('If idle, to disk in: 110 min'), told.join());
});

const said = (given: ISlice | null): string => texts.announcement(given, NOW, trans);

test('what changes all the time is not said aloud', () => {
  assert.equal(said(null), '');
  assert.equal(said(slice()), said(slice({ memory: full })));
  assert.equal(said(waiting()), said(waiting({ expected_wait: [60, 60] })));
  assert.equal(said(slice({ ends_at: NOW + 60 })), said(slice({ ends_at: NOW + 300 })));
  assert.equal(said(waiting()), 'GPU slice: 3rd in the queue');
  assert.notEqual(said(waiting()), said(waiting({ position: 2 })));
  assert.notEqual(said(slice()), said(slice({ ends_at: NOW + 60 })));
});

test('a session without a file is called by its kernel', () => {
  assert.equal(texts.about(slice()), 'one.ipynb');
  assert.equal(texts.about(slice({ notebook: null })), 'Python 3 (GPU 2%)');
  const made = { notebook: '101d40c2-3f3a-4011-9d74-fe7590165a85' };
  assert.equal(texts.about(slice(made)), 'Python 3 (GPU 2%)');
});

test('several notebooks may use one kernel: the one in front counts', () => {
  assert.equal(texts.about(slice(), 'folder/two.ipynb'), 'folder/two.ipynb');
  assert.equal(texts.about(slice(), null), 'one.ipynb');
});

table<number>('no longer than is allowed', most => texts.keepChoices(most), [
  [0, []],
  [59, []],
  [600, [600]],
  [1800, [1800]],
  [5400, [1800, 3600, 5400]],
  [14_400, [1800, 3600, 7200, 14_400]],
  [86_400, [1800, 3600, 7200, 14_400]]
]);

test('others of mine that are idle might give their slices', () => {
  const actions = { 'give-back': { keeps_variables: true, shuts_down: false } };
  const idle = slice({ kernel_id: 'i', idle_since: NOW - 5, actions });
  const all = [
    waiting(),
    idle,
    slice({ kernel_id: 'j', actions }),
    slice({ kernel_id: 'p', state: 'parked', idle_since: NOW - 5, actions }),
    slice({ kernel_id: 'n', idle_since: NOW - 5 })
  ];
  assert.deepEqual(texts.idleOthers(waiting(), all), [idle]);
  assert.deepEqual(texts.idleOthers(idle, all), []);
});

test('how firm limits are', () => {
  assert.match(texts.firmness('hard', 'MPS', trans), /^hard: .*\(MPS\)$/);
  assert.match(texts.firmness('cooperative', 'PyTorch', trans), /^cooperative: kept by PyTorch/);
  assert.match(
    texts.firmness('none', 'accounting only', trans),
    /^none \(accounting only\): nothing/
  );
});

test('devices are counted', () => {
  const one = { name: 'V100', simulated: true };
  assert.equal(texts.devices(slice({ devices: [one] }), trans), 'V100 (simulated)');
  const two = slice({ devices: [one, one, { name: 'H100', simulated: false }], node: 'n1' });
  assert.equal(texts.devices(two, trans), '2 × V100 (simulated), H100 on n1');
});

const labels = (given: ISlice): string[] =>
  texts.rows(given, NOW, trans).map(row => `${row.label}: ${row.value}`);

test('the panel lists what there is', () => {
  assert.deepEqual(labels(slice({ ends_at: NOW + 7200, pending_size: '10%' })), [
    'Device: V100',
    'Memory: 512 of 655 MiB',
    'Memory limit: none (accounting only): nothing stops a program from using more',
    'Compute: 2%',
    'Compute limit: none (accounting only): nothing stops a program from using more',
    'After a restart: 10%',
    'Held for: 1 min',
    'Time left: 2 h'
  ]);
  assert.deepEqual(labels(waiting({ ends_at: NOW + 60 })), ['Waiting for: 1 min']);
  assert.deepEqual(labels(waiting({ job: 'Slurm job 4711' })), [
    'Job: Slurm job 4711',
    'Waiting for: 1 min'
  ]);
  const unknown = { granted_mib: 0, used_mib: null, strength: 'none', by: 'gres' } as const;
  assert.equal(labels(slice({ memory: unknown }))[1], 'Memory: not known');
  assert.deepEqual(
    labels(slice({ idle_since: NOW - 120, gives_back_at: NOW + 180, kept_until: NOW + 60 })).slice(
      6
    ),
    ['Idle for: 2 min', 'If idle, lent in: 3 min', 'Kept for: 1 min']
  );
  assert.deepEqual(labels(slice({ yields_at: NOW + 60 })).slice(6), [
    'Lent if somebody waits: in 1 min, sooner if they have waited'
  ]);
  assert.deepEqual(labels(slice({ yields_at: NOW - 60 })).slice(6), [
    'Lent if somebody waits: at any time'
  ]);
});

test('what actions cost', () => {
  const given = slice({
    actions: {
      keep: { at_most: 600 },
      resize: { sizes: ['10%'], keeps_variables: true },
      restart: { sizes: ['10%'], keeps_variables: false },
      'give-back': { keeps_variables: true, shuts_down: false }
    }
  });
  const lost = (action: texts.Action): boolean => texts.losesVariables(given, action);
  assert.deepEqual((['keep', 'resize', 'restart', 'give-back', 'leave-queue'] as const).map(lost), [
    false,
    false,
    true,
    false,
    false
  ]);
  assert.match(texts.cost(given, 'restart', trans), /all variables are lost/);
  assert.match(texts.cost(given, 'give-back', trans), /Variables are kept/);
  assert.equal(lost('start-fresh'), true);
  assert.match(texts.cost(given, 'start-fresh', trans), /all variables are lost/);
  const direct = slice({ actions: { 'give-back': { keeps_variables: false, shuts_down: true } } });
  assert.match(texts.cost(direct, 'give-back', trans), /shut down: all variables are lost/);
});
