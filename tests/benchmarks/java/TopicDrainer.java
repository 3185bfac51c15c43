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

/** Reads a topic from its first message to its last, twice, and prints how long the second time took. */
@SuppressWarnings("deprecation")
public final class TopicDrainer {
    // A broker gives fewer, unless it is told otherwise.
    private static final int MOST_IN_A_PULL = 1000;
    private static final long PATIENCE_MS = 30_000;

    private interface Drain {
        /** Takes each of so many messages. */
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
        // A consumer's own shutdown takes seconds, and its threads outlive an error.
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

    private static void take(List<MessageExt> found, LongAdder messages, LongAdder bytes) {
        for (MessageExt message : found) {
            bytes.add(message.getBody().length);
        }
        messages.add(found.size());
    }

    /** The consumer pulls with threads of its own, and hands over what they have found. */
    private static Drain lite(String nameServer, String topic, int threads, long expected) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("bench-lite");
        consumer.setNamesrvAddr(nameServer);
        consumer.setAutoCommit(false);
        consumer.setPullThreadNums(threads);
        // With its defaults it stops for 50 ms whenever it is some thousand messages ahead.
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
            // A pull that is on its way when the consumer seeks may still bring messages: it seeks at the end only.
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
                take(found, messages, bytes);
                seen += found.size();
            }
        };
    }

    /** Threads here pull, each from queues of its own. */
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
                take(result.getMsgFoundList(), messages, bytes);
            }
            offset = result.getNextBeginOffset();
        }
    }
}
