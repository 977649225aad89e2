import * as assert from 'node:assert/strict';
import { test } from 'node:test';

import { backOff, ISocket, Stream } from '../src/stream';

class FakeSocket implements ISocket {
  onmessage: ((event: { data: any }) => void) | null = null;
  onclose: (() => void) | null = null;
  isClosed = false;

  close(): void {
    this.isClosed = true;
  }
}

class Page {
  sockets: FakeSocket[] = [];
  heard: string[] = [];
  losses = 0;
  waits: { call: () => void; ms: number }[] = [];
  stream = new Stream(
    () => {
      this.sockets.push(new FakeSocket());
      return this.last;
    },
    data => this.heard.push(data),
    () => this.losses++,
    (call, ms) => {
      const wait = { call, ms };
      this.waits.push(wait);
      return () => this.waits.splice(this.waits.indexOf(wait), 1);
    }
  );

  get last(): FakeSocket {
    return this.sockets[this.sockets.length - 1];
  }

  /** Close the socket, and let the time pass after which it is opened again. */
  lose(): number {
    this.last.onclose!();
    const { call, ms } = this.waits.pop()!;
    call();
    return ms;
  }
}

test('what is sent is heard', () => {
  const page = new Page();
  page.stream.start();
  page.last.onmessage!({ data: 'one' });
  assert.deepEqual(page.heard, ['one']);
});

test('one socket is open at a time', () => {
  const page = new Page();
  page.stream.start();
  page.stream.start();
  assert.equal(page.sockets.length, 1);
  page.last.onclose!();
  page.stream.start();
  assert.equal(page.sockets.length, 1);
  assert.equal(page.waits.length, 1);
});

test('a lost socket is told, and opened again later and later', () => {
  const page = new Page();
  page.stream.start();
  const waits = [1, 2, 3, 4].map(() => page.lose());
  assert.equal(page.losses, 4);
  assert.equal(page.sockets.length, 5);
  assert.ok(waits[3] > 2 * waits[0], `${waits}`);
});

test('what is heard makes the next wait short again', () => {
  const page = new Page();
  page.stream.start();
  for (let n = 0; n < 8; n++) {
    page.lose();
  }
  page.last.onmessage!({ data: '' });
  assert.ok(page.lose() <= 1000);
});

test('a stopped stream stays closed and says nothing', () => {
  const page = new Page();
  page.stream.start();
  page.stream.stop();
  assert.ok(page.last.isClosed);
  assert.equal(page.last.onclose, null);
  page.stream.start();
  page.last.onclose!();
  page.stream.stop();
  assert.equal(page.waits.length, 0);
  assert.equal(page.losses, 1);
});

test('attempts are at most a minute apart, and not at the same moment', () => {
  assert.equal(backOff(0, 1), 1000);
  assert.equal(backOff(0, 0), 500);
  assert.equal(backOff(1000, 1), 60_000);
});
