import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Makes a topic, writes a transaction to it, reads it in a group and commits, with any client since 2.1. */
public class OlderClient {
    static final int COUNT = 100;

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0], topic = arguments[1];
        Properties common = new Properties();
        common.put("bootstrap.servers", address);
        try (AdminClient admin = AdminClient.create(common)) {
            admin.createTopics(Set.of(new NewTopic(topic, 2, (short) 1))).all().get();
            System.out.println("NODES " + admin.describeCluster().nodes().get().size());
        }
        Properties writing = new Properties();
        writing.putAll(common);
        writing.put("transactional.id", topic);
        try (var producer = new KafkaProducer<>(writing, new StringSerializer(), new StringSerializer())) {
            producer.initTransactions();
            producer.beginTransaction();
            for (int number = 0; number < COUNT; number++) {
                producer.send(new ProducerRecord<>(topic, number % 2, "k", "v" + number));
            }
            producer.commitTransaction();
        }
        Properties reading = new Properties();
        reading.putAll(common);
        reading.put("group.id", topic);
        reading.put("auto.offset.reset", "earliest");
        reading.put("enable.auto.commit", "false");
        reading.put("isolation.level", "read_committed");
        try (var consumer = new KafkaConsumer<>(reading, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            int read = 0;
            while (read < COUNT) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofSeconds(1))) {
                    read++;
                }
            }
            consumer.commitSync();
            long committed = 0;
            for (int partition = 0; partition < 2; partition++) {
                OffsetAndMetadata found = consumer.committed(new TopicPartition(topic, partition));
                committed += found.offset();
            }
            System.out.println("READ " + read + " COMMITTED " + committed);
        }
        System.exit(0);
    }
}
