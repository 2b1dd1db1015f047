// franz-go against a gateway: kgo's producers, groups, regular expressions, transactions, share
// groups' neighbours; kadm's administration. Arguments: BOOTSTRAP PREFIX. Prints OK.
package main

import (
	"context"
	"fmt"
	"os"
	"sort"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const records = 500

var (
	bootstrap string
	prefix    string
	ctx       context.Context
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

func client(options ...kgo.Opt) *kgo.Client {
	made, err := kgo.NewClient(append(options, kgo.SeedBrokers(bootstrap))...)
	check(err, "client")
	return made
}

// produce sends numbered records in every codec; idempotent, as kgo is by default.
func produce(topic string) {
	codecs := []kgo.CompressionCodec{
		kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(),
		kgo.Lz4Compression(), kgo.ZstdCompression(),
	}
	for index, codec := range codecs {
		producer := client(kgo.ProducerBatchCompression(codec))
		var sent []*kgo.Record
		for number := 0; number < records/len(codecs); number++ {
			sent = append(sent, &kgo.Record{
				Topic: topic, Key: []byte(fmt.Sprint(number)),
				Value:   []byte(fmt.Sprintf("%d-%d", index, number)),
				Headers: []kgo.RecordHeader{{Key: "codec", Value: []byte{byte(index)}}},
			})
		}
		check(producer.ProduceSync(ctx, sent...).FirstErr(), "produce")
		producer.Close()
	}
}

// read polls until so many records have come, and returns the values of each, counted.
func read(consumer *kgo.Client, count int) map[string]int {
	found := map[string]int{}
	for total := 0; total < count; {
		fetches := consumer.PollFetches(ctx)
		require(len(fetches.Errors()) == 0, "fetch: %v", fetches.Errors())
		fetches.EachRecord(func(record *kgo.Record) {
			found[string(record.Value)]++
			total++
		})
	}
	return found
}

func once(found map[string]int, count int) {
	require(len(found) == count, "%d values instead of %d", len(found), count)
	for value, times := range found {
		require(times == 1, "%s came %d times", value, times)
	}
}

// copyExactly copies a topic by transactions with the offsets of its group.
func copyExactly(from, to string) {
	for _, commits := range []bool{false, true} {
		session, err := kgo.NewGroupTransactSession(
			kgo.SeedBrokers(bootstrap), kgo.TransactionalID(prefix+"-copy"),
			kgo.ConsumerGroup(prefix+"-copy"), kgo.ConsumeTopics(from),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
			kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RequireStableFetchOffsets(),
			kgo.FetchMaxBytes(4000),
		)
		check(err, "session")
		for total := 0; total < records; {
			fetches := session.PollFetches(ctx)
			require(len(fetches.Errors()) == 0, "fetch: %v", fetches.Errors())
			check(session.Begin(), "begin")
			fetches.EachRecord(func(record *kgo.Record) {
				copied := &kgo.Record{Topic: to, Key: record.Key, Value: record.Value}
				session.Produce(ctx, copied,
					func(_ *kgo.Record, err error) {
						if commits { // an abort fails what is buffered
							check(err, "produce in a transaction")
						}
					})
				total++
			})
			committed, err := session.End(ctx, kgo.TransactionEndTry(commits))
			check(err, "end")
			require(committed == commits, "committed is %v", committed)
			if !commits {
				break
			}
		}
		session.Close()
	}
	reader := client(
		kgo.ConsumeTopics(to), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	once(read(reader, records), records)
	reader.Close()
}

func administer(admin *kadm.Client, topic, group string) {
	brokers, err := admin.ListBrokers(ctx)
	check(err, "brokers")
	require(len(brokers) == 1, "brokers: %v", brokers)
	_, err = admin.ApiVersions(ctx)
	check(err, "versions")
	configs, err := admin.DescribeTopicConfigs(ctx, topic)
	check(err, "configs")
	_, err = configs.On(topic, nil)
	check(err, "configs of the topic")
	value := "lz4"
	altered, err := admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{
		{Op: kadm.SetConfig, Name: "compression.type", Value: &value},
	}, topic)
	check(err, "alter")
	for _, each := range altered {
		check(each.Err, "alter "+each.Name)
	}
	ends, err := admin.ListEndOffsets(ctx, topic)
	check(err, "end offsets")
	check(ends.Error(), "end offsets")
	total := int64(0)
	ends.Each(func(offset kadm.ListedOffset) { total += offset.Offset })
	require(total == records, "end offsets are %d", total)
	starts, err := admin.ListOffsetsAfterMilli(ctx, time.Now().Add(-time.Hour).UnixMilli(), topic)
	check(err, "offsets by time")
	check(starts.Error(), "offsets by time")
	groups, err := admin.ListGroups(ctx)
	check(err, "groups")
	names := groups.Groups()
	require(sort.SearchStrings(names, group) < len(names), "groups: %v", names)
	lags, err := admin.Lag(ctx, group)
	check(err, "lag")
	lags.Each(func(lag kadm.DescribedGroupLag) {
		check(lag.Error(), "lag of a group")
		require(lag.Lag.Total() == 0, "lag is %d", lag.Lag.Total())
	})
	_, err = admin.DescribeAllLogDirs(ctx, nil)
	check(err, "log directories")
	grown, err := admin.UpdatePartitions(ctx, 5, topic)
	check(err, "grow")
	_, err = grown.On(topic, nil)
	check(err, "grow the topic")
	deleted, err := admin.DeleteRecords(ctx, kadm.Offsets{topic: {0: {
		Topic: topic, Partition: 0, At: 1, LeaderEpoch: -1,
	}}})
	check(err, "delete records")
	deleted.Each(func(each kadm.DeleteRecordsResponse) { check(each.Err, "delete records") })
	_, err = admin.ListTransactions(ctx, nil, nil)
	check(err, "transactions")
	described, err := admin.DescribeTransactions(ctx, prefix+"-copy")
	check(err, "describe the transaction")
	require(described[prefix+"-copy"].Err == nil, "transaction: %v", described)
	gone, err := admin.DeleteGroup(ctx, group)
	check(err, "delete the group")
	check(gone.Err, "delete the group")
	removed, err := admin.DeleteTopics(ctx, topic)
	check(err, "delete the topic")
	for _, each := range removed {
		check(each.Err, "delete "+each.Topic)
	}
	made, err := admin.CreateTopic(ctx, 1, 3, nil, prefix+"-too-many-replicas")
	require(err != nil || made.Err != nil, "three replicas were accepted")
	require(err == kerr.InvalidReplicationFactor, "three replicas: %v %v", err, made)
}

func main() {
	bootstrap, prefix = os.Args[1], os.Args[2]
	var cancel context.CancelFunc
	ctx, cancel = context.WithTimeout(context.Background(), 150*time.Second)
	defer cancel()
	base := client()
	admin := kadm.NewClient(base)
	from, to := prefix+"-from", prefix+"-to"
	created, err := admin.CreateTopics(ctx, 3, 1, nil, from, to)
	check(err, "create topics")
	check(created.Error(), "create topics")
	produce(from)
	group := prefix + "-group"
	for index, balancer := range []kgo.GroupBalancer{
		kgo.CooperativeStickyBalancer(), kgo.RangeBalancer(),
	} {
		reader := client(
			kgo.ConsumerGroup(fmt.Sprintf("%s-%d", group, index)), kgo.ConsumeTopics(from),
			kgo.Balancers(balancer), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		)
		once(read(reader, records), records)
		check(reader.CommitUncommittedOffsets(ctx), "commit")
		reader.Close()
	}
	pattern := client(
		kgo.ConsumeRegex(), kgo.ConsumeTopics("^"+prefix+"-fr.*$"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	once(read(pattern, records), records)
	pattern.Close()
	copyExactly(from, to)
	administer(admin, from, group+"-0")
	admin.Close()
	fmt.Println("OK")
}
