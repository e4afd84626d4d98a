/** What every worker thread is given when it starts: the shared memory all tasks refer to. */
export interface WorkerSetup {
  /** The slabs that reads fill. */
  readonly arena: SharedArrayBuffer;
  /** The slabs that compressed blocks go to; null where nothing is compressed. */
  readonly compressedArena: SharedArrayBuffer | null;
  readonly compressedSlabBytes: number;
  readonly cancelWords: SharedArrayBuffer;
}
