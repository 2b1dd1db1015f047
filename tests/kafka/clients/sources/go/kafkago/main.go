// kafka-go against a gateway: writers in every codec, readers with and without a group, the raw
// connection. Arguments: BOOTSTRAP PREFIX. Prints OK.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/segmentio/kafka-go"
)

const records = 500

var ctx context.Context

func check(err error, what string) {
	if err != nil {
		panic(fmt.Sprintf("%s: %v", what, err))
	}
}

func require(holds bool, format string, values ...any) {
	if !holds {
		panic(fmt.Sprintf(format, values...))
	}
}

func produce(bootstrap, topic string) {
	for codec := kafka.Compression(0); codec <= kafka.Zstd; codec++ {
		writer := &kafka.Writer{
			Addr: kafka.TCP(bootstrap), Topic: topic, RequiredAcks: kafka.RequireAll,
			Compression: codec, Balancer: &kafka.Hash{}, BatchTimeout: 10 * time.Millisecond,
		}
		var sent []kafka.Message
		for number := 0; number < records/5; number++ {
			sent = append(sent, kafka.Message{
				Key: []byte(fmt.Sprint(number)), Value: []byte(fmt.Sprintf("%d-%d", codec, number)),
				Headers: []kafka.Header{{Key: "codec", Value: []byte{byte(codec)}}},
			})
		}
		check(writer.WriteMessages(ctx, sent...), "write")
		check(writer.Close(), "close")
	}
}

func read(reader *kafka.Reader, count int, commits bool) {
	found := map[string]int{}
	for total := 0; total < count; total++ {
		message, err := reader.FetchMessage(ctx)
		check(err, "fetch")
		found[string(message.Value)]++
		if commits && (total+1)%100 == 0 {
			check(reader.CommitMessages(ctx, message), "commit")
		}
	}
	require(len(found) == count, "%d values instead of %d", len(found), count)
	check(reader.Close(), "close")
}

func main() {
	bootstrap, prefix := os.Args[1], os.Args[2]
	var cancel context.CancelFunc
	ctx, cancel = context.WithTimeout(context.Background(), 150*time.Second)
	defer cancel()
	topic, one := prefix+"-from", prefix+"-one"
	conn, err := kafka.DialContext(ctx, "tcp", bootstrap)
	check(err, "dial")
	_, err = conn.Controller()
	check(err, "controller")
	_, err = conn.ApiVersions()
	check(err, "versions")
	check(conn.CreateTopics(
		kafka.TopicConfig{Topic: topic, NumPartitions: 3, ReplicationFactor: 1},
		kafka.TopicConfig{Topic: one, NumPartitions: 1, ReplicationFactor: 1},
	), "create")
	produce(bootstrap, topic)
	produce(bootstrap, one)
	read(kafka.NewReader(kafka.ReaderConfig{
		Brokers: []string{bootstrap}, Topic: topic, GroupID: prefix, StartOffset: kafka.FirstOffset,
		MaxWait: 200 * time.Millisecond,
	}), records, true)
	read(kafka.NewReader(kafka.ReaderConfig{
		Brokers: []string{bootstrap}, Topic: one, MaxWait: 200 * time.Millisecond,
	}), records, false)
	leader, err := kafka.DialLeader(ctx, "tcp", bootstrap, one, 0)
	check(err, "leader")
	first, last, err := leader.ReadOffsets()
	check(err, "offsets")
	require(first == 0 && last == records, "offsets %d %d", first, last)
	_, err = leader.WriteMessages(kafka.Message{Value: []byte("by the connection")})
	check(err, "write by the connection")
	client := &kafka.Client{Addr: kafka.TCP(bootstrap)}
	groups, err := client.ListGroups(ctx, &kafka.ListGroupsRequest{})
	check(err, "groups")
	require(len(groups.Groups) >= 1, "groups %v", groups)
	described, err := client.DescribeGroups(ctx, &kafka.DescribeGroupsRequest{GroupIDs: []string{prefix}})
	check(err, "describe")
	check(described.Groups[0].Error, "describe the group")
	offsets, err := client.OffsetFetch(ctx, &kafka.OffsetFetchRequest{
		GroupID: prefix, Topics: map[string][]int{topic: {0, 1, 2}},
	})
	check(err, "offsets of the group")
	require(len(offsets.Topics[topic]) == 3, "offsets %v", offsets)
	deleted, err := client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	check(err, "delete")
	check(deleted.Errors[topic], "delete the topic")
	fmt.Println("OK")
}
