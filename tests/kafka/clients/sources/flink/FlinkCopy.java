import java.util.Properties;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.*;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Flink copies a topic exactly once. Arguments: BOOTSTRAP FROM TO CHECKPOINTS, and the checkpoint
 * to go on from, or nothing. It runs until it is killed.
 */
public class FlinkCopy {
    public static void main(String[] args) throws Exception {
        Configuration config = new Configuration();
        config.setString("execution.checkpointing.dir", "file://" + args[3]);
        config.setString("execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION");
        config.setString("restart-strategy.type", "fixed-delay");
        config.setString("restart-strategy.fixed-delay.attempts", "100");
        config.setString("restart-strategy.fixed-delay.delay", "500ms");
        if (args.length > 4) config.setString("execution.state-recovery.path", args[4]);
        var flink = StreamExecutionEnvironment.createLocalEnvironment(1, config);
        flink.enableCheckpointing(500, CheckpointingMode.EXACTLY_ONCE);
        var source = KafkaSource.<String>builder()
            .setBootstrapServers(args[0]).setTopics(args[1]).setGroupId("flink")
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setProperty("isolation.level", "read_committed")
            .setValueOnlyDeserializer(new SimpleStringSchema()).build();
        Properties producer = new Properties();
        producer.put("transaction.timeout.ms", "60000");
        var sink = KafkaSink.<String>builder()
            .setBootstrapServers(args[0]).setKafkaProducerConfig(producer)
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix("flink-" + args[2])
            .setRecordSerializer(KafkaRecordSerializationSchema.<String>builder()
                .setTopic(args[2]).setValueSerializationSchema(new SimpleStringSchema()).build())
            .build();
        flink.fromSource(source, WatermarkStrategy.noWatermarks(), "in").sinkTo(sink);
        System.out.println("STARTS");
        flink.execute();
    }
}
