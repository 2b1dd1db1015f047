import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.acl.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.quota.*;
import org.apache.kafka.common.resource.*;
import org.apache.kafka.common.serialization.*;

/**
 * Calls everything of Java's clients that sends a request of another kind, and prints "STEP name ok",
 * or the error. Arguments: properties file, log directory of the broker.
 */
public class EveryApi {
    static final String TOPIC = "every", SHARED = "shared";
    static final TopicPartition PLACE = new TopicPartition(TOPIC, 0);

    interface Step { void run() throws Exception; }

    static void step(String name, Step step) {
        try {
            step.run();
            System.out.println("STEP " + name + " ok");
        } catch (Exception error) {
            Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
            System.out.println("STEP " + name + " " + cause);
        }
    }

    static Properties with(Properties common, String... pairs) {
        Properties found = new Properties();
        found.putAll(common);
        for (int at = 0; at < pairs.length; at += 2) found.put(pairs[at], pairs[at + 1]);
        return found;
    }

    static Consumer<String, String> consumer(Properties common, String group, String protocol) {
        Properties p = with(common, "group.id", group, "group.protocol", protocol,
            "auto.offset.reset", "earliest", "enable.auto.commit", "false");
        if (protocol.equals("classic")) p.put("heartbeat.interval.ms", "300");
        return new KafkaConsumer<>(p, new StringDeserializer(), new StringDeserializer());
    }

    static void read(Consumer<String, String> consumer) {
        consumer.subscribe(List.of(TOPIC));
        int count = 0;
        for (long until = System.nanoTime() + 60_000_000_000L; count < 1 && System.nanoTime() < until; )
            count += consumer.poll(Duration.ofMillis(500)).count();
        if (count == 0) throw new IllegalStateException("no record came");
        consumer.commitSync();
    }

    public static void main(String[] args) throws Exception {
        Properties common = new Properties();
        try (var file = new java.io.FileInputStream(args[0])) { common.load(file); }
        Admin admin = Admin.create(common);
        step("createTopics", () -> admin.createTopics(List.of(
            new NewTopic(TOPIC, 1, (short) 1), new NewTopic(SHARED, 1, (short) 1))).all().get());
        step("createPartitions", () -> admin.createPartitions(
            Map.of(TOPIC, NewPartitions.increaseTo(2))).all().get());
        step("describeTopics", () -> admin.describeTopics(List.of(TOPIC)).allTopicNames().get());
        step("describeCluster", () -> admin.describeCluster().nodes().get());
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, TOPIC);
        step("describeConfigs", () -> admin.describeConfigs(List.of(topic)).all().get());
        step("incrementalAlterConfigs", () -> admin.incrementalAlterConfigs(Map.of(topic, List.of(
            new AlterConfigOp(new ConfigEntry("retention.ms", "3600000"), AlterConfigOp.OpType.SET))))
            .all().get());
        step("listConfigResources", () -> admin.listConfigResources().all().get());
        step("describeLogDirs", () -> admin.describeLogDirs(List.of(0)).allDescriptions().get());
        step("alterReplicaLogDirs", () -> admin.alterReplicaLogDirs(
            Map.of(new TopicPartitionReplica(TOPIC, 0, 0), args[1])).all().get());
        step("electLeaders", () -> admin.electLeaders(ElectionType.PREFERRED, Set.of(PLACE))
            .partitions().get());
        step("alterPartitionReassignments", () -> admin.alterPartitionReassignments(Map.of(PLACE,
            Optional.of(new NewPartitionReassignment(List.of(0))))).all().get());
        step("listPartitionReassignments", () -> admin.listPartitionReassignments().reassignments().get());
        step("describeFeatures", () -> admin.describeFeatures().featureMetadata().get());
        step("updateFeatures", () -> admin.updateFeatures(Map.of("metadata.version",
            new FeatureUpdate((short) 1, FeatureUpdate.UpgradeType.SAFE_DOWNGRADE)),
            new UpdateFeaturesOptions()).all().get());
        step("describeMetadataQuorum", () -> admin.describeMetadataQuorum().quorumInfo().get());

        Properties transactional = with(common, "transactional.id", "every");
        Producer<String, String> producer =
            new KafkaProducer<>(transactional, new StringSerializer(), new StringSerializer());
        step("transaction", () -> {
            producer.initTransactions();
            producer.beginTransaction();
            for (String to : List.of(TOPIC, SHARED))
                for (int number = 0; number < 10; number++)
                    producer.send(new ProducerRecord<>(to, 0, "k", "v" + number));
            producer.sendOffsetsToTransaction(
                Map.of(PLACE, new OffsetAndMetadata(1)), new ConsumerGroupMetadata("every-copy"));
            producer.commitTransaction();
        });
        step("listTransactions", () -> admin.listTransactions().all().get());
        step("describeTransactions", () -> admin.describeTransactions(List.of("every")).all().get());
        step("describeProducers", () -> admin.describeProducers(List.of(PLACE)).all().get());
        step("abortTransaction", () -> {
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(TOPIC, 0, "k", "open")).get();
            ProducerState found = null;
            while (found == null)  // until the coordinator has heard of it
                found = admin.describeProducers(List.of(PLACE)).all().get().get(PLACE)
                    .activeProducers().stream()
                    .filter(one -> one.currentTransactionStartOffset().isPresent())
                    .findFirst().orElse(null);
            admin.abortTransaction(new AbortTransactionSpec(PLACE, found.producerId(),
                (short) found.producerEpoch(), found.coordinatorEpoch().orElse(0))).all().get();
        });
        step("fenceProducers", () -> admin.fenceProducers(List.of("every")).all().get());
        producer.close(Duration.ofSeconds(1));

        step("classic", () -> {
            try (var one = consumer(common, "every-classic", "classic")) {
                read(one);
                Thread.sleep(1000);
                one.seek(PLACE, new OffsetAndMetadata(1, Optional.of(0), ""));
                one.poll(Duration.ofSeconds(1));
                admin.describeClassicGroups(List.of("every-classic")).all().get();
            }
        });
        step("consumer", () -> {
            try (var one = consumer(common, "every-consumer", "consumer")) {
                read(one);
                admin.describeConsumerGroups(List.of("every-consumer")).all().get();
            }
        });
        step("listOffsets", () -> admin.listOffsets(Map.of(PLACE, OffsetSpec.latest())).all().get());
        step("listGroups", () -> admin.listGroups().all().get());
        step("listConsumerGroupOffsets", () -> admin.listConsumerGroupOffsets("every-classic")
            .partitionsToOffsetAndMetadata().get());
        step("alterConsumerGroupOffsets", () -> admin.alterConsumerGroupOffsets("every-classic",
            Map.of(PLACE, new OffsetAndMetadata(0))).all().get());
        step("deleteConsumerGroupOffsets", () -> admin.deleteConsumerGroupOffsets("every-classic",
            Set.of(PLACE)).all().get());
        step("deleteConsumerGroups", () -> admin.deleteConsumerGroups(List.of("every-classic"))
            .all().get());

        step("share", () -> {
            Properties p = with(common, "group.id", "every-share", "share.acknowledgement.mode",
                "explicit");
            try (var one = new KafkaShareConsumer<>(p, new StringDeserializer(),
                    new StringDeserializer())) {
                one.subscribe(List.of(SHARED));
                one.poll(Duration.ofSeconds(2));
                try (var more = new KafkaProducer<>(common, new StringSerializer(),
                        new StringSerializer())) {
                    for (int number = 0; number < 10; number++)
                        more.send(new ProducerRecord<>(SHARED, 0, "k", "v")).get();
                }
                int count = 0;
                for (long until = System.nanoTime() + 60_000_000_000L;
                        count < 1 && System.nanoTime() < until; )
                    for (var record : one.poll(Duration.ofMillis(500))) {
                        one.acknowledge(record, AcknowledgeType.ACCEPT);
                        count++;
                    }
                if (count == 0) throw new IllegalStateException("no record came");
                for (var each : one.commitSync().values())
                    if (each.isPresent()) throw each.get();
                admin.describeShareGroups(List.of("every-share")).all().get();
            }
        });
        step("listShareGroupOffsets", () -> admin.listShareGroupOffsets(
            Map.of("every-share", new ListShareGroupOffsetsSpec())).all().get());
        step("alterShareGroupOffsets", () -> admin.alterShareGroupOffsets("every-share",
            Map.of(new TopicPartition(SHARED, 0), 0L)).all().get());
        step("deleteShareGroupOffsets", () -> admin.deleteShareGroupOffsets("every-share",
            Set.of(SHARED)).all().get());
        step("deleteShareGroups", () -> admin.deleteShareGroups(List.of("every-share")).all().get());

        ClientQuotaEntity user = new ClientQuotaEntity(Map.of(ClientQuotaEntity.USER, "limited"));
        step("alterClientQuotas", () -> admin.alterClientQuotas(List.of(new ClientQuotaAlteration(user,
            List.of(new ClientQuotaAlteration.Op("producer_byte_rate", 1e9))))).all().get());
        step("describeClientQuotas", () -> admin.describeClientQuotas(ClientQuotaFilter.all())
            .entities().get());
        step("alterUserScramCredentials", () -> admin.alterUserScramCredentials(List.of(
            new UserScramCredentialUpsertion("limited", new ScramCredentialInfo(
                ScramMechanism.SCRAM_SHA_256, 8192), "a password"))).all().get());
        step("describeUserScramCredentials", () -> admin.describeUserScramCredentials().all().get());
        AclBinding rule = new AclBinding(
            new ResourcePattern(ResourceType.TOPIC, TOPIC, PatternType.LITERAL),
            new AccessControlEntry("User:limited", "*", AclOperation.READ, AclPermissionType.ALLOW));
        step("createAcls", () -> admin.createAcls(List.of(rule)).all().get());
        step("describeAcls", () -> admin.describeAcls(rule.toFilter()).values().get());
        step("deleteAcls", () -> admin.deleteAcls(List.of(rule.toFilter())).all().get());
        step("deleteRecords", () -> admin.deleteRecords(
            Map.of(PLACE, RecordsToDelete.beforeOffset(1))).all().get());
        step("deleteTopics", () -> admin.deleteTopics(List.of(TOPIC)).all().get());
        admin.close(Duration.ofSeconds(5));
    }
}
