import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Reads all messages of a topic twice, and prints the duration of the second read. */
@SuppressWarnings("deprecation")
public final class TopicDrainer {
    // A broker with default settings returns fewer.
    private static final int MOST_IN_A_PULL = 1000;
    private static final long PATIENCE_MS = 30_000;

    private interface Drain {
        /** Reads all messages, and counts them and the bytes of their bodies. */
        void run(LongAdder messages, LongAdder bytes) throws Exception;
    }

    /** Arguments: name server, topic, "lite" or "pull" (which consumer), threads, messages in the topic. */
    public static void main(String[] given) {
        int code = 0;
        try {
            drainTwice(given);
        } catch (Exception failed) {
            failed.printStackTrace();
            code = 1;
        }
        // shutdown() of a consumer takes seconds, and its threads continue after an error.
        System.out.flush();
        Runtime.getRuntime().halt(code);
    }

    private static void drainTwice(String[] given) throws Exception {
        int threads = Integer.parseInt(given[3]);
        long expected = Long.parseLong(given[4]);
        Drain drain = given[2].equals("lite")
            ? lite(given[0], given[1], threads, expected)
            : pull(given[0], given[1], threads);
        time(drain, expected);
        System.out.println("{\"messages\": " + expected + ", \"seconds\": " + time(drain, expected) + "}");
    }

    private static double time(Drain drain, long expected) throws Exception {
        LongAdder messages = new LongAdder();
        LongAdder bytes = new LongAdder();
        long began = System.nanoTime();
        drain.run(messages, bytes);
        double seconds = (System.nanoTime() - began) / 1e9;
        if (messages.sum() != expected || bytes.sum() < expected) {
            throw new IllegalStateException(messages + " messages instead of " + expected + ", " + bytes + " bytes");
        }
        return seconds;
    }

    private static void count(List<MessageExt> found, LongAdder messages, LongAdder bytes) {
        for (MessageExt message : found) {
            bytes.add(message.getBody().length);
        }
        messages.add(found.size());
    }

    /** Reads with the consumer's threads: they pull, and poll() returns their messages. */
    private static Drain lite(String nameServer, String topic, int threads, long expected) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("bench-lite");
        consumer.setNamesrvAddr(nameServer);
        consumer.setAutoCommit(false);
        consumer.setPullThreadNums(threads);
        // With its defaults the consumer waits for 50 ms whenever it has some thousand messages in memory.
        consumer.setPullThresholdForAll(1_000_000);
        consumer.setPullThresholdForQueue(50_000);
        consumer.setPullThresholdSizeForQueue(1024);
        consumer.setConsumeMaxSpan(50_000);
        consumer.setPullBatchSize(MOST_IN_A_PULL);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(topic));
        AtomicBoolean assigned = new AtomicBoolean();
        return (messages, bytes) -> {
            // A pull in flight during a seek may still return messages, so the consumer seeks only after the last one.
            if (assigned.getAndSet(true)) {
                for (MessageQueue queue : queues) {
                    consumer.seekToBegin(queue);
                }
            } else {
                consumer.assign(queues);
            }
            for (long seen = 0; seen < expected; ) {
                List<MessageExt> found = consumer.poll(PATIENCE_MS);
                if (found.isEmpty()) {
                    return;
                }
                count(found, messages, bytes);
                seen += found.size();
            }
        };
    }

    /** Reads with threads of this class. Each thread pulls from other queues. */
    private static Drain pull(String nameServer, String topic, int threads) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("bench-pull");
        consumer.setNamesrvAddr(nameServer);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchSubscribeMessageQueues(topic));
        return (messages, bytes) -> {
            AtomicReference<Exception> failed = new AtomicReference<>();
            List<Thread> running = new ArrayList<>();
            for (int number = 0; number < threads; number++) {
                int first = number;
                Thread thread = new Thread(() -> {
                    try {
                        for (int at = first; at < queues.size(); at += threads) {
                            drain(consumer, queues.get(at), messages, bytes);
                        }
                    } catch (Exception stopped) {
                        failed.set(stopped);
                    }
                });
                thread.start();
                running.add(thread);
            }
            for (Thread thread : running) {
                thread.join();
            }
            if (failed.get() != null) {
                throw failed.get();
            }
        };
    }

    private static void drain(DefaultMQPullConsumer consumer, MessageQueue queue, LongAdder messages, LongAdder bytes)
            throws Exception {
        long end = consumer.maxOffset(queue);
        for (long offset = consumer.minOffset(queue); offset < end; ) {
            PullResult result = consumer.pull(queue, "*", offset, MOST_IN_A_PULL);
            if (result.getPullStatus() == PullStatus.FOUND) {
                count(result.getMsgFoundList(), messages, bytes);
            }
            offset = result.getNextBeginOffset();
        }
    }
}
