import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { createInterface } from 'node:readline';
import { describe, expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { packageRoot } from '../../src/minivm/native.ts';
import { bitsOf, fault, guests, highPage, rangesOf, TempFolder, twoRegions } from './helpers.ts';

const imageBytes = 24 * 1024 * 1024;
const imagePages = imageBytes / 4096;

describe.each(guests)('snapshots of a %s guest', (backend) => {
  test('a full snapshot restores in a fresh process, page for page, and runs on', async () => {
    using folder = new TempFolder();
    const [snapshotPath, memFilePath] = [folder.file('state'), folder.file('mem')];
    await using vm = await launchMiniVm({ backend, dialect: 'aenv', regions: twoRegions });
    await vm.run({ pages: { seed: 1, count: 300 } });
    await vm.deviceWrites({ pages: { firstPage: highPage + 10, pageCount: 3 } });
    await vm.program({ pages: { pages: [5, 6, 7] }, loop: true, words: 4 });
    await vm.pause();
    await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath });
    const hashes = await vm.hashes(0, imagePages);
    const before = await vm.counters();
    await vm.resume();

    expect(statSync(memFilePath).size).toBe(imageBytes);
    const restore = { snapshotPath, memoryPath: memFilePath };
    await using copy = await launchMiniVm({ backend, dialect: 'aenv', restore });
    expect((await copy.info()).state).toBe('Paused');
    expect(await copy.hashes(0, imagePages)).toEqual(hashes);
    expect((await copy.counters()).counter).toBe(before.counter);
    expect(await rangesOf(copy, '/vm/dirty-memory-ranges')).toEqual([]);
    await copy.resume();
    await copy.waitForPasses(before.passes + 3);
    await copy.pause();
    expect(await rangesOf(copy, '/vm/dirty-memory-ranges')).toEqual([5, 6, 7]);
    const after = await copy.counters();
    expect(after.counter).toBeGreaterThan(before.counter);
    const now = await copy.hashes(0, imagePages);
    now.forEach((hash, page) => {
      if (page < 5 || page > 7) expect(hash, `page ${page}`).toBe(hashes[page]);
    });
  });

  test('a diff holds the dirty pages, and making it resets them', async () => {
    using folder = new TempFolder();
    const mem = folder.file('mem');
    await using vm = await launchMiniVm({ backend, dialect: 'firecracker', regions: twoRegions });
    await vm.run({ pages: { pages: [0, 1, 700] } });
    await vm.deviceWrites({ pages: { pages: [highPage] } });
    await vm.pause();
    const full = { snapshotPath: folder.file('s0'), memFilePath: folder.file('m0') };
    await vm.createSnapshot({ type: 'Full', ...full });
    await vm.resume();
    await vm.run({ pages: { pages: [700, 701] } });
    await vm.deviceWrites({ pages: { pages: [highPage + 1] } });
    await vm.pause();
    await vm.createSnapshot({ type: 'Diff', snapshotPath: folder.file('s1'), memFilePath: mem });
    expect(statSync(mem).size).toBe(imageBytes);
    expect(statSync(mem).blocks * 512).toBe(3 * 4096);
    expect(bitsOf(await vm.set('dirty'))).toEqual([]);
    const data = readFileSync(mem);
    for (const page of [700, 701, highPage + 1]) {
      const at = page * 4096;
      expect(data.subarray(at, at + 4096).equals(await vm.readBytes(at, 4096))).toBe(true);
    }
    // Merging the diff over the full file is what a restore of the chain reads.
    execFileSync('cp', ['--sparse=always', full.memFilePath, folder.file('merged')]);
    const merged = readFileSync(folder.file('merged'));
    for (const page of [700, 701, highPage + 1]) {
      data.copy(merged, page * 4096, page * 4096, (page + 1) * 4096);
    }
    writeFileSync(folder.file('merged'), merged);
    const hashes = await vm.hashes(0, imagePages);
    const restore = { snapshotPath: folder.file('s1'), memoryPath: folder.file('merged') };
    await using copy = await launchMiniVm({ backend, dialect: 'firecracker', restore });
    expect(await copy.hashes(0, imagePages)).toEqual(hashes);
  });

  test('a state-only snapshot writes no memory and resets nothing', async () => {
    using folder = new TempFolder();
    for (const dialect of ['aenv', 'e2b'] as const) {
      await using vm = await launchMiniVm({ backend, dialect, memoryMib: 16 });
      await vm.run({ pages: { pages: [3, 9] } });
      await vm.pause();
      await vm.createSnapshot({ type: 'Diff', snapshotPath: folder.file(dialect) });
      expect(statSync(folder.file(dialect)).size).toBeLessThan(64 * 1024);
      expect(bitsOf(await vm.set('dirty'))).toEqual([3, 9]);
    }
  });

  test('after a restored guest only read, its dirty set is empty', async () => {
    using folder = new TempFolder();
    const [snapshotPath, memFilePath] = [folder.file('state'), folder.file('mem')];
    await using vm = await launchMiniVm({ backend, memoryMib: 16 });
    await vm.run({ pages: { firstPage: 0, pageCount: 2000 }, words: 2 });
    await vm.pause();
    await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath });
    const restore = { snapshotPath, memoryPath: memFilePath, resume: true };
    await using copy = await launchMiniVm({ backend, restore });
    await copy.run({ pages: { firstPage: 0, pageCount: 4096 }, fill: 'read' });
    await copy.pause();
    expect(bitsOf(await copy.set('dirty'))).toEqual([]);
    expect(bitsOf(await copy.set('resident'))).toHaveLength(4096);
  });
});

test('a snapshot needs a paused VM, a writable path, and upstream a memory file', async () => {
  using folder = new TempFolder();
  await using vm = await launchMiniVm({ dialect: 'firecracker', memoryMib: 16 });
  const body = { snapshot_path: folder.file('s'), mem_file_path: folder.file('m') };
  expect(await fault(vm, 'PUT', '/snapshot/create', body)).toMatch('is running');
  await vm.pause();
  expect(await fault(vm, 'PUT', '/snapshot/create', { snapshot_path: 's' })).toMatch(
    'mem_file_path',
  );
  const nowhere = { ...body, mem_file_path: folder.file('no/such/folder') };
  expect(await fault(vm, 'PUT', '/snapshot/create', nowhere)).toMatch('os error 2');
  expect(await fault(vm, 'PUT', '/snapshot/create', { ...body, snapshot_type: 'Half' })).toMatch(
    'snapshot_type',
  );
  await expect(
    vm.loadSnapshot({ snapshotPath: body.snapshot_path, memoryPath: body.mem_file_path }),
  ).rejects.toThrow('after starting');
});

test('a load that fails says why, and the process ends as Firecracker does', async () => {
  using folder = new TempFolder();
  const [snapshotPath, memFilePath] = [folder.file('state'), folder.file('mem')];
  await using vm = await launchMiniVm({ memoryMib: 16 });
  await vm.pause();
  await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath });
  const state = readFileSync(snapshotPath);
  const write = (name: string, data: Buffer): string => {
    writeFileSync(folder.file(name), data);
    return folder.file(name);
  };
  const flipped = Buffer.from(state);
  flipped.writeUInt8(flipped.readUInt8(200) ^ 1, 200);
  const short = write('short-mem', readFileSync(memFilePath));
  truncateSync(short, 16 * 1024 * 1024 - 1);
  const bad = [
    [folder.file('none'), memFilePath, /Cannot open the VM state file/],
    [write('empty', Buffer.alloc(0)), memFilePath, /too short/],
    [write('noise', Buffer.alloc(4096, 0x5a)), memFilePath, /not a state file/],
    [write('cut', state.subarray(0, state.length - 9)), memFilePath, /checksum/],
    [write('flipped', flipped), memFilePath, /checksum/],
    [snapshotPath, short, /shorter than the 16777216 bytes/],
    [snapshotPath, folder.file('none'), /Cannot open the memory file/],
  ] as const;
  for (const [path_, memoryPath, message] of bad) {
    await using copy = await launchMiniVm({ start: false });
    await expect(copy.loadSnapshot({ snapshotPath: path_, memoryPath })).rejects.toThrow(message);
    expect(await copy.exited).toEqual({ code: 1, signal: null });
  }
});

test('a snapshot is not loaded over boot configuration, nor made over its own memory', async () => {
  using folder = new TempFolder();
  const [snapshotPath, memFilePath] = [folder.file('state'), folder.file('mem')];
  await using vm = await launchMiniVm({ memoryMib: 16 });
  await vm.pause();
  await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath });
  const restore = { snapshotPath, memoryPath: memFilePath };
  await using configured = await launchMiniVm({ start: false });
  await configured.configure({ memoryMib: 16, track: true });
  await expect(configured.loadSnapshot(restore)).rejects.toThrow('after configuring');
  await configured.start();
  await using copy = await launchMiniVm({ restore });
  await expect(copy.createSnapshot({ type: 'Full', snapshotPath, memFilePath })).rejects.toThrow(
    'backs this VM',
  );
});

const userfaultfd =
  process.getuid?.() === 0 ||
  readFileSync('/proc/sys/vm/unprivileged_userfaultfd', 'utf8').trim() === '1';
if (!userfaultfd) console.log('userfaultfd needs root here: restoring through it is not tested');

test.runIf(userfaultfd)('memory comes page by page from a userfaultfd handler', async () => {
  using folder = new TempFolder();
  const [snapshotPath, memFilePath] = [folder.file('state'), folder.file('mem')];
  await using vm = await launchMiniVm({ backend: 'thread', regions: twoRegions });
  await vm.run({ pages: { seed: 9, count: 100 } });
  await vm.pause();
  await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath });
  const hashes = await vm.hashes(0, imagePages);

  const handlerFile = folder.file('uffd_handler');
  const source = path.join(packageRoot(), 'native', 'minivm', 'test', 'uffd_handler.cpp');
  execFileSync('g++', ['-std=c++20', '-O1', source, '-o', handlerFile]);
  const socket = folder.file('uffd.sock');
  const handler = spawn(handlerFile, [socket, memFilePath], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const lines = createInterface({ input: handler.stdout });
  const said: string[] = [];
  lines.on('line', (line) => said.push(line));
  // Waited for from here on: the handler may end before the VM does.
  const closed = once(lines, 'close');
  await once(lines, 'line');
  {
    const restore = { snapshotPath, backend: 'Uffd', memoryPath: socket, resume: true } as const;
    await using copy = await launchMiniVm({ backend: 'thread', dialect: 'aenv', restore });
    expect(bitsOf(await copy.set('resident'))).toEqual([]);
    await copy.run({ pages: { pages: [1, 2] }, fill: 'constant', value: 3 });
    await copy.pause();
    expect(bitsOf(await copy.set('resident'))).toEqual([1, 2]);
    expect(await rangesOf(copy, '/vm/dirty-memory-ranges')).toEqual([1, 2]);
    const now = await copy.hashes(3, imagePages - 3);
    expect(now).toEqual(hashes.subarray(3));
  }
  await closed;
  expect(said).toEqual(['listening', `served ${imagePages - 1}`]);
});
