import java.io.FileOutputStream;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.util.Arrays;
import java.util.Scanner;
import java.util.UUID;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Records when messages were due (the first 8 bytes of a body), and when they came to the listener.
 *
 * <p>Lines of stdin: "from BEGAN" forgets everything, and later ignores messages that were due before. "take COUNT FILE"
 * waits for so many messages while any come, and writes the pairs of times. Each answer is a line of JSON.
 */
public final class Arrivals {
    private static final long PATIENCE_MS = 3_000;
    private static final int MOST_IN_A_PULL = 1_024;

    private static long began = Long.MAX_VALUE;
    private static long[] pairs = new long[1 << 20];
    private static int count;

    /** Arguments: name server, topic. */
    public static void main(String[] given) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("omb-" + UUID.randomUUID());
        consumer.setNamesrvAddr(given[0]);
        consumer.setPullBatchSize(MOST_IN_A_PULL);
        consumer.setConsumeMessageBatchMaxSize(MOST_IN_A_PULL);
        // Otherwise the consumer pauses whenever a queue has a thousand messages in memory.
        consumer.setPullThresholdForQueue(50_000);
        consumer.setConsumeConcurrentlyMaxSpan(50_000);
        consumer.subscribe(given[1], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            synchronized (Arrivals.class) {
                for (MessageExt message : messages) {
                    long due = ByteBuffer.wrap(message.getBody()).getLong();
                    if (due >= began) {
                        pairs = 2 * count < pairs.length ? pairs : Arrays.copyOf(pairs, 2 * pairs.length);
                        pairs[2 * count] = due;
                        pairs[2 * count++ + 1] = now;
                    }
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        int queues = consumer.fetchSubscribeMessageQueues(given[1]).size();
        while (consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().size() < queues) {
            Thread.sleep(50);
        }
        Scanner lines = new Scanner(System.in);
        while (lines.hasNextLine()) {
            String[] words = lines.nextLine().split(" ");
            if (words[0].equals("from")) {
                synchronized (Arrivals.class) {
                    began = Long.parseLong(words[1]);
                    count = 0;
                }
            } else {
                take(Integer.parseInt(words[1]), words[2]);
            }
            System.out.println("{\"received\": " + count() + "}");
            System.out.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private static synchronized int count() {
        return count;
    }

    private static void take(int expected, String file) throws Exception {
        long quietSince = System.nanoTime();
        for (int before = count(); before < expected; ) {
            Thread.sleep(10);
            int now = count();
            if (now != before) {
                quietSince = System.nanoTime();
            } else if (System.nanoTime() - quietSince > PATIENCE_MS * 1_000_000) {
                break;
            }
            before = now;
        }
        // What comes twice comes soon.
        Thread.sleep(200);
        synchronized (Arrivals.class) {
            try (FileChannel out = new FileOutputStream(file).getChannel()) {
                OpenLoop.write(out, pairs, 2 * count);
            }
        }
    }
}
