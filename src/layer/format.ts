/** Numbers of the layer format that policy needs. Source: FORMAT.md; native code has the rest. */

/** A row without bytes: the range reads as zero. Third column of a segment row. */
export const ZEROED_ROW = 2n ** 64n - 1n;

/** Columns of a segment row: image offset, length, slab offset or ZEROED_ROW; all bytes. */
export const ROW_COLUMNS = 3;

/** Segments that one layer can have: 1,000,000 index entries, padding to 256s included. */
export const SEGMENTS_MAX = 999_936;

/** The "no parent" of a layer header. */
export const NIL_UUID = '00000000-0000-0000-0000-000000000000';

export const compressions = ['none', 'lz4', 'zstd'] as const;
export type Compression = (typeof compressions)[number];

/** Block sizes that the writer uses. Readers take 64 KiB too, which fails on noise. */
export const writtenBlockBytes = [4096, 8192, 16384, 32768] as const;

export const DEFAULT_BLOCK_BYTES = 4096;

/** Number of a compression in ZFile headers; 0 = no ZFile. */
export const codecOf = { none: 0, lz4: 1, zstd: 2 } as const satisfies Record<Compression, number>;

export const compressionOf = (codec: 0 | 1 | 2): Compression =>
  codec === 0 ? 'none' : codec === 1 ? 'lz4' : 'zstd';

/** Longest segment that the writer makes: 16376 sectors, whole pages below the 14-bit limit. */
export const SEGMENT_BYTES_MAX = 16_376 * 512;
