// node example.mjs tcp://127.0.0.1:7420 TOPIC [COUNT]: sends COUNT records with keys, reads them back, prints what it did as JSON.

import { Client, murmur2 } from "./tailrace.mjs";

const [address, name, count = "1000"] = process.argv.slice(2);
const client = await Client.connect(address);
const topic = await client.topic(name);
const partitions = topic.partitions.length;
const byPartition = Array.from({ length: partitions }, () => []);
for (let n = 0; n < Number(count); n++) {
  const key = Buffer.from(`k${n % 7}`);
  byPartition[(murmur2(key) & 0x7fffffff) % partitions].push({ key, value: Buffer.from(`value ${n}`), timestamp: Date.now() });
}
const sending = [];
byPartition.forEach((records, partition) => {
  for (let at = 0; at < records.length; at += 250) sending.push([partition, records.slice(at, at + 250)]);
});
for (const [partition, records] of sending) await client.produce(name, partition, records);
let read = 0;
const byKey = {};
for (let partition = 0; partition < partitions; partition++) {
  for (let offset = 0, end = 1; offset < end; ) {
    const { rows, next, highWatermark } = await client.fetch(name, partition, offset);
    for (const row of rows) {
      (byKey[Buffer.from(row.key)] ??= new Set()).add(partition);
      read++;
    }
    [offset, end] = [next, highWatermark];
  }
}
client.close();
console.log(JSON.stringify({ sent: Number(count), read, partitions: Object.fromEntries(Object.entries(byKey).map(([key, at]) => [key, [...at]])) }));
