// sarama against a gateway: producers in every codec, a group, a transactional copy, and
// administration. Arguments: BOOTSTRAP PREFIX. Prints OK.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

const records = 500

var (
	bootstrap []string
	prefix    string
)

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

func config() *sarama.Config {
	made := sarama.NewConfig()
	made.Version = sarama.V4_0_0_0
	made.Producer.Return.Successes = true
	made.Producer.RequiredAcks = sarama.WaitForAll
	made.Consumer.Offsets.Initial = sarama.OffsetOldest
	made.Consumer.IsolationLevel = sarama.ReadCommitted
	return made
}

func produce(topic string) {
	codecs := []sarama.CompressionCodec{
		sarama.CompressionNone, sarama.CompressionGZIP, sarama.CompressionSnappy,
		sarama.CompressionLZ4, sarama.CompressionZSTD,
	}
	for index, codec := range codecs {
		settings := config()
		settings.Producer.Compression = codec
		settings.Producer.Idempotent = true
		settings.Net.MaxOpenRequests = 1
		producer, err := sarama.NewSyncProducer(bootstrap, settings)
		check(err, "producer")
		var sent []*sarama.ProducerMessage
		for number := 0; number < records/len(codecs); number++ {
			sent = append(sent, &sarama.ProducerMessage{
				Topic: topic, Key: sarama.StringEncoder(fmt.Sprint(number)),
				Value:   sarama.StringEncoder(fmt.Sprintf("%d-%d", index, number)),
				Headers: []sarama.RecordHeader{{Key: []byte("codec"), Value: []byte{byte(index)}}},
			})
		}
		check(producer.SendMessages(sent), "send")
		check(producer.Close(), "close")
	}
}

// copier sends each claimed record on, in a transaction with its offset.
type copier struct {
	producer sarama.AsyncProducer
	to       string
	found    map[string]int
	lock     sync.Mutex
	stop     context.CancelFunc
}

func (*copier) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*copier) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (c *copier) ConsumeClaim(
	session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim,
) error {
	for {
		select {
		case message, is_open := <-claim.Messages():
			if !is_open {
				return nil
			}
			c.take(session, message)
		case <-session.Context().Done():
			return nil
		}
	}
}

func (c *copier) take(session sarama.ConsumerGroupSession, message *sarama.ConsumerMessage) {
	c.lock.Lock()
	defer c.lock.Unlock()
	if c.producer == nil {
		session.MarkMessage(message, "")
	} else {
		check(c.producer.BeginTxn(), "begin")
		c.producer.Input() <- &sarama.ProducerMessage{
			Topic: c.to, Value: sarama.ByteEncoder(message.Value),
		}
		check(c.producer.AddMessageToTxn(message, prefix+"-copy", nil), "add the offset")
		check(c.producer.CommitTxn(), "commit")
	}
	c.found[string(message.Value)]++
	if len(c.found) == records {
		c.stop()
	}
}

func consume(name, topic string, handler *copier) {
	settings := config()
	settings.Consumer.Offsets.AutoCommit.Enable = handler.producer == nil
	group, err := sarama.NewConsumerGroup(bootstrap, name, settings)
	check(err, "group")
	ctx, stop := context.WithTimeout(context.Background(), 100*time.Second)
	handler.found, handler.stop = map[string]int{}, stop
	for ctx.Err() == nil {
		err := group.Consume(ctx, []string{topic}, handler)
		if err != nil && !errors.Is(err, sarama.ErrClosedConsumerGroup) &&
			!errors.Is(err, context.Canceled) {
			panic(err)
		}
	}
	check(group.Close(), "close the group")
	require(len(handler.found) == records, "%d values", len(handler.found))
	for value, times := range handler.found {
		require(times == 1, "%s came %d times", value, times)
	}
}

func administer(admin sarama.ClusterAdmin, topic string) {
	_, controller, err := admin.DescribeCluster()
	check(err, "cluster")
	require(controller == 0, "controller %d", controller)
	topics, err := admin.ListTopics()
	check(err, "topics")
	require(topics[topic].NumPartitions == 3, "topics: %v", topics)
	value := "lz4"
	check(admin.IncrementalAlterConfig(sarama.TopicResource, topic,
		map[string]sarama.IncrementalAlterConfigsEntry{
			"compression.type": {Operation: sarama.IncrementalAlterConfigsOperationSet, Value: &value},
		}, false), "alter")
	entries, err := admin.DescribeConfig(sarama.ConfigResource{
		Type: sarama.TopicResource, Name: topic, ConfigNames: []string{"compression.type"},
	})
	check(err, "configs")
	require(len(entries) == 1 && entries[0].Value == value, "configs: %v", entries)
	groups, err := admin.ListConsumerGroups()
	check(err, "groups")
	require(len(groups) >= 2, "groups: %v", groups)
	described, err := admin.DescribeConsumerGroups([]string{prefix + "-group"})
	check(err, "describe")
	require(described[0].State == "Empty", "state %s", described[0].State)
	offsets, err := admin.ListConsumerGroupOffsets(prefix+"-copy", nil)
	check(err, "offsets")
	total := int64(0)
	for _, block := range offsets.Blocks[topic] {
		total += block.Offset
	}
	require(total == records, "offsets are %d: %v", total, offsets.Blocks)
	check(admin.CreatePartitions(topic, 4, nil, false), "grow")
	check(admin.DeleteRecords(topic, map[int32]int64{0: 1}), "delete records")
	check(admin.DeleteConsumerGroup(prefix+"-group"), "delete the group")
	_, err = admin.DescribeLogDirs([]int32{0})
	check(err, "log directories")
	check(admin.DeleteTopic(topic), "delete the topic")
}

func main() {
	bootstrap, prefix = strings.Split(os.Args[1], ","), os.Args[2]
	admin, err := sarama.NewClusterAdmin(bootstrap, config())
	check(err, "admin")
	from, to := prefix+"-from", prefix+"-to"
	for _, topic := range []string{from, to} {
		check(admin.CreateTopic(topic, &sarama.TopicDetail{
			NumPartitions: 3, ReplicationFactor: 1,
		}, false), "create")
	}
	produce(from)
	consume(prefix+"-group", from, &copier{})
	settings := config()
	settings.Producer.Idempotent = true
	settings.Producer.Transaction.ID = prefix + "-copy"
	settings.Producer.Return.Successes = false
	settings.Net.MaxOpenRequests = 1
	producer, err := sarama.NewAsyncProducer(bootstrap, settings)
	check(err, "transactional producer")
	consume(prefix+"-copy", from, &copier{producer: producer, to: to})
	check(producer.Close(), "close")
	consume(prefix+"-copied", to, &copier{})
	administer(admin, from)
	check(admin.Close(), "close")
	fmt.Println("OK")
}
