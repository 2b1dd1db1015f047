//! rdkafka against a gateway: idempotent producer, group, transactional copy, administration.
//! Arguments: BOOTSTRAP PREFIX. Prints OK.
use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};

const RECORDS: usize = 300;
const LIMIT: Duration = Duration::from_secs(100);

fn config(bootstrap: &str) -> ClientConfig {
    let mut made = ClientConfig::new();
    made.set("bootstrap.servers", bootstrap)
        .set("allow.auto.create.topics", "true");
    made
}

fn consumer(bootstrap: &str, group: &str, protocol: &str, topic: &str) -> BaseConsumer {
    let found: BaseConsumer = config(bootstrap)
        .set("group.id", group)
        .set("group.protocol", protocol)
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.commit", "false")
        .set("isolation.level", "read_committed")
        .create()
        .unwrap();
    found.subscribe(&[topic]).unwrap();
    found
}

/// The next record; a poll returns nothing after an event, as a rebalance.
fn next(consumer: &BaseConsumer) -> BorrowedMessage<'_> {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(message) = consumer.poll(Duration::from_secs(1)) {
            return message.unwrap();
        }
        assert!(Instant::now() < end, "no record came");
    }
}

fn read(consumer: &BaseConsumer) {
    let mut found: HashMap<Vec<u8>, usize> = HashMap::new();
    while found.len() < RECORDS {
        let message = next(consumer);
        *found
            .entry(message.payload().unwrap().to_vec())
            .or_default() += 1;
    }
    assert!(found.values().all(|times| *times == 1));
}

fn produce(bootstrap: &str, topic: &str) {
    for (index, codec) in ["none", "gzip", "lz4"].iter().enumerate() {
        let producer: ThreadedProducer<DefaultProducerContext> = config(bootstrap)
            .set("enable.idempotence", "true")
            .set("compression.type", *codec)
            .create()
            .unwrap();
        for number in 0..RECORDS / 3 {
            let headers = OwnedHeaders::new().insert(Header {
                key: "codec",
                value: Some(*codec),
            });
            let record = BaseRecord::to(topic)
                .key(&format!("{number}"))
                .payload(&format!("{index}-{number}"))
                .headers(headers)
                .send_to(&producer);
            assert!(record);
        }
        producer.flush(LIMIT).unwrap();
        assert_eq!(producer.in_flight_count(), 0);
    }
}

trait SendTo {
    fn send_to(self, producer: &ThreadedProducer<DefaultProducerContext>) -> bool;
}

impl SendTo for BaseRecord<'_, String, String> {
    fn send_to(self, producer: &ThreadedProducer<DefaultProducerContext>) -> bool {
        producer.send(self).is_ok()
    }
}

fn copy(bootstrap: &str, prefix: &str, from: &str, to: &str) {
    let producer: ThreadedProducer<DefaultProducerContext> = config(bootstrap)
        .set("transactional.id", format!("{prefix}-copy"))
        .create()
        .unwrap();
    producer.init_transactions(LIMIT).unwrap();
    producer.begin_transaction().unwrap();
    producer
        .send(BaseRecord::<str, str>::to(to).payload("aborted"))
        .unwrap();
    producer.abort_transaction(LIMIT).unwrap();
    let reader = consumer(bootstrap, &format!("{prefix}-copy"), "classic", from);
    for _ in 0..RECORDS {
        let message = next(&reader);
        assert_eq!(message.headers().unwrap().get(0).key, "codec");
        producer.begin_transaction().unwrap();
        producer
            .send(BaseRecord::<[u8], [u8]>::to(to).payload(message.payload().unwrap()))
            .unwrap();
        let position = reader.position().unwrap();
        let metadata = reader.group_metadata().unwrap();
        producer
            .send_offsets_to_transaction(&position, &metadata, LIMIT)
            .unwrap();
        producer.commit_transaction(LIMIT).unwrap();
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (bootstrap, prefix) = (arguments[1].as_str(), arguments[2].as_str());
    let (from, to) = (format!("{prefix}-from"), format!("{prefix}-to"));
    produce(bootstrap, &from);
    for protocol in ["classic", "consumer"] {
        let reader = consumer(bootstrap, &format!("{prefix}-{protocol}"), protocol, &from);
        read(&reader);
        reader.commit_consumer_state(CommitMode::Sync).unwrap();
        let metadata = reader.fetch_metadata(Some(&from), LIMIT).unwrap();
        assert_eq!(metadata.topics()[0].partitions().len(), 4);
        let groups = reader.fetch_group_list(None, LIMIT).unwrap();
        assert!(
            groups
                .groups()
                .iter()
                .any(|each| each.name() == format!("{prefix}-{protocol}"))
        );
        assert_eq!(reader.fetch_watermarks(&from, 0, LIMIT).unwrap().0, 0);
    }
    copy(bootstrap, prefix, &from, &to);
    read(&consumer(
        bootstrap,
        &format!("{prefix}-copied"),
        "classic",
        &to,
    ));
    println!("OK");
}
