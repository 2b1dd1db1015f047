// A small client of Tailrace, written from docs/protocol.md and docs/format.md: handshake, credit, produce (idempotent, acks=all), fetch, verify, decode.
//
//     npm install
//     node example.mjs tcp://127.0.0.1:7420 orders
//
// It follows one connection. When that is lost (another generation, SESSION_UNKNOWN, silence) it throws: a client for production opens a new
// one and sends again, in order, what was not acknowledged, with the sequences it had ("A connection's life").

import { crc32c } from "@node-rs/crc32";
import * as arrow from "apache-arrow";
import { Dealer } from "zeromq";

const Api = { HANDSHAKE: 1, PING: 2, PRODUCE: 3, FETCH: 4, METADATA: 5, CREATE_TOPICS: 6, INIT_PRODUCER_ID: 9, LIST_OFFSETS: 10, CREDIT: 12 };
const SPOKEN = { [Api.FETCH]: [2, 2] }; // every other API: version 1
const REQUEST_MAGIC = 0x51525254;
const RESPONSE_MAGIC = 0x53525254;
const HEADER_BYTES = 136;
const ATTRIBUTE_CONTROL = 2;
const ATTRIBUTE_LOG_APPEND_TIME = 16;
const UNPACKED_MAX_BYTES = 64 << 20;

export class TailraceError extends Error {
  constructor(code, message) {
    super(`${message} [${code}]`);
    this.code = code;
  }
}

// ---- batches ("A batch" in docs/format.md) -----------------------------------------------------------------------------------------

/** What header checksums of a partition start from: CRC32C of the 16-byte topic id and the partition. */
export function checksumSeed(topicId, partition) {
  const bytes = Buffer.alloc(20);
  topicId.copy(bytes);
  bytes.writeInt32LE(partition, 16);
  return crc32c(bytes);
}

/** Records ({key, value, headers: Buffers or null, timestamp: ms}) as a batch of the default schema. */
export function encodeBatch(records, { schema, schemaId, seed, producerId, epoch, sequence }) {
  const children = schema.fields.map((field) => {
    const builder = arrow.makeBuilder({ type: field.type, nullValues: [null] });
    for (const record of records) builder.append(record[field.name] ?? null);
    return builder.finish().flush();
  });
  const data = arrow.makeData({ type: new arrow.Struct(schema.fields), length: records.length, nullCount: 0, children });
  const writer = new arrow.RecordBatchStreamWriter({ autoDestroy: false });
  writer.write(new arrow.RecordBatch(schema, data));
  const stream = Buffer.from(writer.finish().toUint8Array(true));
  // The stream is the schema message, the batch's message, the end mark: cut the batch out.
  const start = 8 + stream.readUInt32LE(4);
  const message = stream.subarray(start, stream.length - 8);
  const metadataSize = message.readUInt32LE(4);
  const header = Buffer.alloc(HEADER_BYTES);
  const stamps = records.map((record) => BigInt(record.timestamp) * 1000n);
  header.writeUInt32LE(message.length + HEADER_BYTES, 12); // batch_length
  header.writeUInt32LE(records.length - 1, 24); // last_offset_delta
  header.writeUInt32LE(records.length, 28); // record_count
  header.writeBigInt64LE(stamps[0], 32);
  header.writeBigInt64LE(stamps.reduce((a, b) => (a > b ? a : b)), 40);
  header.writeBigInt64LE(-1n, 48); // append_time_us
  header.writeBigInt64LE(BigInt(producerId), 56);
  header.writeInt32LE(sequence, 64);
  header.writeInt16LE(epoch, 68);
  header.writeInt32LE(-1, 72); // leader_epoch
  header.writeUInt32LE(schemaId, 76);
  for (const at of [88, 96, 104]) header.writeBigInt64LE(-1n, at); // due_us, delay_position, min_tick
  header.writeUInt16LE(HEADER_BYTES, 128);
  header.writeUInt16LE(1, 130); // version
  header.write("TRB1", 132, "latin1");
  const prefix = Buffer.from(message.subarray(0, 8 + metadataSize));
  prefix.writeUInt32LE(metadataSize + HEADER_BYTES, 4);
  const body = message.subarray(8 + metadataSize);
  header.writeUInt32LE(crc32c(body, crc32c(prefix)), 8); // body_crc32c: everything but the header
  header.writeUInt32LE(crc32c(header.subarray(4), seed), 0);
  return Buffer.concat([prefix, header, body]);
}

/** The batch at `start` of `data`, both checksums proven: {header, bytes}. */
export function readBatch(data, start, seed) {
  const metadataEnd = start + 8 + data.readUInt32LE(start + 4);
  const at = metadataEnd - HEADER_BYTES;
  if (data.toString("latin1", at + 132, at + 136) !== "TRB1" || data.readUInt16LE(at + 130) !== 1) throw new Error("not a batch of version 1");
  const length = data.readUInt32LE(at + 12);
  const bytes = data.subarray(start, start + length);
  const header = data.subarray(at, metadataEnd);
  const extension = header.readUInt32LE(112);
  const seeded = crc32c(header.subarray(4), extension ? crc32c(data.subarray(at - extension, at), seed) : seed);
  const body = crc32c(data.subarray(metadataEnd, start + length), crc32c(data.subarray(start, at - extension)));
  if (seeded !== header.readUInt32LE(0) || body !== header.readUInt32LE(8)) throw new TailraceError("CORRUPT_BATCH", "a checksum does not match");
  return {
    bytes,
    attributes: header.readUInt32LE(4),
    baseOffset: Number(header.readBigInt64LE(16)),
    nextOffset: Number(header.readBigInt64LE(16)) + header.readUInt32LE(24) + 1,
    appendTimeUs: header.readBigInt64LE(48),
    leaderEpoch: header.readInt32LE(72),
  };
}

/** The rows of a batch. `schemaMessage`: that of METADATA. */
export function rowsOf(batch, schemaMessage) {
  if (batch.attributes & ATTRIBUTE_CONTROL) return [];
  if (batch.bytes.length > UNPACKED_MAX_BYTES) throw new TailraceError("RECORD_TOO_LARGE", "a batch that large is not unpacked");
  const end = Buffer.from([0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
  const table = arrow.tableFromIPC(Buffer.concat([schemaMessage, batch.bytes, end]));
  return table.toArray().map((row, number) => ({ offset: batch.baseOffset + number, ...row.toJSON() }));
}

// ---- partitions, as Kafka chooses them ---------------------------------------------------------------------------------------------

export function murmur2(data) {
  const m = 0x5bd1e995;
  let h = 0x9747b28c ^ data.length;
  let at = 0;
  for (; at + 4 <= data.length; at += 4) {
    let k = Math.imul(data.readUInt32LE(at), m);
    k ^= k >>> 24;
    h = Math.imul(h, m) ^ Math.imul(k, m);
  }
  const rest = data.length - at;
  if (rest === 3) h ^= data[at + 2] << 16;
  if (rest >= 2) h ^= data[at + 1] << 8;
  if (rest >= 1) h = Math.imul(h ^ data[at], m);
  h = Math.imul(h ^ (h >>> 13), m);
  return (h ^ (h >>> 15)) >>> 0;
}

// ---- connection --------------------------------------------------------------------------------------------------------------------

export class Client {
  #socket = new Dealer({ linger: 0 });
  #waiting = new Map(); // correlation id -> {resolve, reject}
  #creditWaiters = [];
  #versions = {};
  #next = 1;
  #sent = 0; // bytes of batches
  #received = 0;
  #limit = 0;
  #generation = 0;
  #producer = null;
  #sequences = new Map(); // "topic id-partition" -> next sequence
  #topics = new Map();

  static async connect(address) {
    const client = new Client();
    client.#socket.connect(address);
    client.#listen().catch((error) => client.#lose(error));
    const versions = Object.fromEntries(Object.values(Api).map((api) => [api, SPOKEN[api] ?? [1, 1]]));
    const answer = await client.#ask(Api.HANDSHAKE, { versions, client_id: "example-js" });
    client.#versions = answer.versions;
    client.#generation = answer.generation;
    return client;
  }

  close() {
    this.#socket.close();
  }

  async #listen() {
    for await (const [head, ...body] of this.#socket) {
      if (head.readUInt32LE(0) !== RESPONSE_MAGIC) throw new Error("the other end does not speak Tailrace's protocol");
      const generation = head.readUInt32LE(32);
      if (this.#generation && generation !== this.#generation) throw new TailraceError("SESSION_UNKNOWN", "the appliance has restarted");
      this.#limit = Number(head.readBigUInt64LE(24));
      for (const wake of this.#creditWaiters.splice(0)) wake();
      const waiting = this.#waiting.get(head.readBigUInt64LE(8));
      if (!waiting) continue; // a push: the credit above
      this.#waiting.delete(head.readBigUInt64LE(8));
      const error = head.readUInt16LE(16);
      if (error) waiting.reject(new TailraceError(error, JSON.parse(body[0]).message));
      else waiting.resolve(body);
    }
  }

  #lose(error) {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }

  #request(api, body) {
    const head = Buffer.alloc(24);
    const id = BigInt(this.#next++);
    head.writeUInt32LE(REQUEST_MAGIC, 0);
    head.writeUInt16LE(api, 4);
    head.writeUInt16LE(this.#versions[api] ?? 1, 6);
    head.writeBigUInt64LE(id, 8);
    head.writeUInt32LE(body.reduce((sum, frame) => sum + frame.length, 0), 20);
    const answer = new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject }));
    return this.#socket.send([head, ...body]).then(() => answer);
  }

  async #ask(api, value) {
    const [body] = await this.#request(api, [Buffer.from(JSON.stringify(value))]);
    return JSON.parse(body);
  }

  async topic(name) {
    if (!this.#topics.has(name)) {
      const { topics } = await this.#ask(Api.METADATA, { topics: [name] });
      if (topics[0].code) throw new TailraceError(topics[0].code, `there is no topic ${name}`);
      const schemaMessage = Buffer.from(topics[0].schema, "base64");
      const schema = arrow.tableFromIPC(schemaMessage).schema;
      this.#topics.set(name, { ...topics[0], id: Buffer.from(topics[0].topic_id, "hex"), schemaMessage, schema });
    }
    return this.#topics.get(name);
  }

  async createTopic(name, partitions = 1, configs = {}) {
    const { results } = await this.#ask(Api.CREATE_TOPICS, { topics: [{ name, partitions, configs, schema: null }] });
    if (results[0].code) throw new TailraceError(results[0].code, results[0].message);
  }

  /** Send one batch to one partition; resolves to its base offset when it is durable. */
  async produce(name, partition, records) {
    const topic = await this.topic(name);
    this.#producer ??= this.#ask(Api.INIT_PRODUCER_ID, {}); // asked for once, by the first call
    const { producer_id: producerId, producer_epoch: epoch } = await this.#producer;
    const key = `${topic.topic_id}-${partition}`;
    const sequence = this.#sequences.get(key) ?? 0;
    this.#sequences.set(key, (sequence + records.length) % 2 ** 31);
    const seed = checksumSeed(topic.id, partition);
    const batch = encodeBatch(records, { schema: topic.schema, schemaId: topic.schema_id, seed, producerId, epoch, sequence });
    await this.#credit(batch.length);
    const request = Buffer.alloc(32);
    topic.id.copy(request);
    request.writeInt32LE(partition, 16);
    request.writeInt32LE(-1, 20); // acks=all
    request.writeUInt32LE(30_000, 24);
    const [answer] = await this.#request(Api.PRODUCE, [request, batch]);
    return Number(answer.readBigInt64LE(0));
  }

  /** Wait until so many bytes may be sent. */
  async #credit(length) {
    while (this.#sent + length > this.#limit) {
      const raised = new Promise((resolve) => this.#creditWaiters.push(resolve));
      const wanted = Buffer.alloc(8);
      wanted.writeBigUInt64LE(BigInt(length));
      this.#request(Api.CREDIT, [wanted]).catch(() => {}); // answered by a push
      await raised;
    }
    this.#sent += length;
  }

  /** Rows from `offset` on, waiting up to `maxWaitMs` for the first: {rows, next, highWatermark}. */
  async fetch(name, partition, offset, { maxWaitMs = 500, leaderEpoch = -1 } = {}) {
    const topic = await this.topic(name);
    const request = Buffer.alloc(24 + 40);
    request.writeUInt32LE(maxWaitMs, 0);
    request.writeUInt32LE(1, 4); // min_bytes
    request.writeUInt32LE(8 << 20, 8); // max_bytes
    request.writeUInt32LE(1, 12); // count
    request.writeBigUInt64LE(BigInt(this.#received), 16);
    topic.id.copy(request, 24);
    request.writeInt32LE(partition, 40);
    request.writeInt32LE(leaderEpoch, 44);
    request.writeBigInt64LE(BigInt(offset), 48);
    request.writeUInt32LE(8 << 20, 56);
    const [entries, data = Buffer.alloc(0)] = await this.#request(Api.FETCH, [request]);
    const error = entries.readUInt16LE(28);
    if (error) throw new TailraceError(error, `${name}-${partition} at offset ${offset}; go on at ${entries.readBigInt64LE(56)}`);
    this.#received += data.length;
    const seed = checksumSeed(topic.id, partition);
    const rows = [];
    let next = offset;
    for (let at = 0; at < data.length; ) {
      const batch = readBatch(data, at, seed);
      for (const row of rowsOf(batch, topic.schemaMessage)) {
        if (batch.attributes & ATTRIBUTE_LOG_APPEND_TIME) row.timestamp = Number(batch.appendTimeUs / 1000n);
        if (row.offset >= offset) rows.push(row); // the first batch holds the offset, it need not begin with it
      }
      at += batch.bytes.length;
      next = batch.nextOffset;
    }
    return { rows, next, highWatermark: Number(entries.readBigInt64LE(40)) };
  }
}
