// @platformatic/kafka against a gateway. Arguments: BOOTSTRAP PREFIX. Prints OK.
import assert from 'node:assert'
import {
  Admin, Consumer, MessagesStreamModes, Producer, stringDeserializers, stringSerializers
} from '@platformatic/kafka'

const [bootstrap, prefix] = process.argv.slice(2)
const records = 300
const options = { clientId: 'platformatic', bootstrapBrokers: [bootstrap] }
const topic = `${prefix}-from`

const admin = new Admin(options)
await admin.createTopics({ topics: [topic], partitions: 3, replicas: 1 })
assert((await admin.listTopics()).includes(topic))
for (const [index, compression] of ['none', 'gzip'].entries()) {
  const producer = new Producer({
    ...options, serializers: stringSerializers, idempotent: true, compression
  })
  const messages = []
  for (let number = 0; number < records / 2; number++) {
    messages.push({ topic, key: `${number}`, value: `${index}-${number}`, headers: { codec: `${index}` } })
  }
  await producer.send({ messages, acks: -1 })
  await producer.close()
}
for (const groupProtocol of ['classic', 'consumer']) {
  const consumer = new Consumer({
    ...options, groupId: `${prefix}-${groupProtocol}`, groupProtocol,
    deserializers: stringDeserializers, autocommit: true
  })
  const stream = await consumer.consume({ topics: [topic], mode: MessagesStreamModes.EARLIEST, maxWaitTime: 200 })
  const found = new Set()
  let count = 0
  for await (const message of stream) {
    found.add(message.value)
    if (++count === records) break
  }
  assert.equal(found.size, records)
  await consumer.close(true)
}
const groups = await admin.listGroups()
assert(groups.has(`${prefix}-classic`))
await admin.deleteTopics({ topics: [topic] })
await admin.close()
console.log('OK')
