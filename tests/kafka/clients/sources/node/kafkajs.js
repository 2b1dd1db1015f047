// kafkajs against a gateway: idempotent producer, group, transactional copy, administration.
// Arguments: BOOTSTRAP PREFIX. Prints OK.
import assert from 'node:assert'
import { CompressionTypes, Kafka, logLevel } from 'kafkajs'

const [bootstrap, prefix] = process.argv.slice(2)
const records = 300
const kafka = new Kafka({ clientId: 'kafkajs', brokers: [bootstrap], logLevel: logLevel.WARN })
const from = `${prefix}-from`
const to = `${prefix}-to`

async function read (group, topic, take = async () => {}) {
  const consumer = kafka.consumer({ groupId: group, readUncommitted: false })
  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  const found = new Map()
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
    consumer.run({
      autoCommit: take.length === 0,
      eachMessage: async payload => {
        await take(payload, consumer)
        const value = payload.message.value.toString()
        found.set(value, (found.get(value) ?? 0) + 1)
        if (found.size === records) resolve()
      }
    }).catch(reject)
  })
  await consumer.disconnect()
  assert.deepEqual([...found.values()], Array(records).fill(1))
}

const admin = kafka.admin()
await admin.connect()
await admin.createTopics({
  topics: [from, to].map(topic => ({ topic, numPartitions: 3, replicationFactor: 1 }))
})
assert((await admin.listTopics()).includes(from))
const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
await producer.connect()
for (const [index, compression] of [CompressionTypes.None, CompressionTypes.GZIP].entries()) {
  const messages = []
  for (let number = 0; number < records / 2; number++) {
    messages.push({ key: `${number}`, value: `${index}-${number}`, headers: { codec: `${index}` } })
  }
  await producer.send({ topic: from, compression, messages })
}
await producer.disconnect()
await read(`${prefix}-group`, from)

const copier = kafka.producer({
  transactionalId: `${prefix}-copy`, idempotent: true, maxInFlightRequests: 1
})
await copier.connect()
const aborted = await copier.transaction()
await aborted.send({ topic: to, messages: [{ value: 'aborted' }] })
await aborted.abort()
await read(`${prefix}-copy`, from, async ({ topic, partition, message }, _consumer) => {
  const transaction = await copier.transaction()
  await transaction.send({ topic: to, messages: [{ value: message.value }] })
  await transaction.sendOffsets({
    consumerGroupId: `${prefix}-copy`,
    topics: [{ topic, partitions: [{ partition, offset: `${Number(message.offset) + 1}` }] }]
  })
  await transaction.commit()
})
await copier.disconnect()
await read(`${prefix}-copied`, to)
const [{ partitions }] = await admin.fetchOffsets({ groupId: `${prefix}-copy`, topics: [from] })
assert.equal(partitions.reduce((sum, each) => sum + Number(each.offset), 0), records)
const { groups } = await admin.listGroups()
assert(groups.some(each => each.groupId === `${prefix}-group`))
assert.equal((await admin.describeGroups([`${prefix}-group`])).groups[0].state, 'Empty')
const { resources } = await admin.describeConfigs({ resources: [{ type: 2, name: from }] })
assert.equal(resources[0].errorCode, 0)
await admin.alterConfigs({
  resources: [{ type: 2, name: from, configEntries: [{ name: 'compression.type', value: 'lz4' }] }]
})
assert.equal((await admin.fetchTopicOffsets(from)).length, 3)
assert((await admin.fetchTopicOffsetsByTimestamp(from, 1)).every(each => each.offset === '0'))
await admin.createPartitions({ topicPartitions: [{ topic: from, count: 4 }] })
await admin.deleteTopicRecords({ topic: from, partitions: [{ partition: 0, offset: '1' }] })
await admin.deleteGroups([`${prefix}-group`])
assert.equal((await admin.describeCluster()).brokers.length, 1)
await admin.deleteTopics({ topics: [from] })
await admin.disconnect()
console.log('OK')
