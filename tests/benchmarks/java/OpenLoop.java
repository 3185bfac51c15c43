import java.io.FileOutputStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.util.Scanner;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** Sends messages when they are due, whether or not others are acknowledged; omb_sender.py describes the protocol. */
public final class OpenLoop {
    private static final long SECOND = 1_000_000_000L;
    private static final long TICK = 250_000;
    private static final long BEHIND = 1;
    private static final long PATIENCE = 15 * SECOND;

    private final DefaultMQProducer producer;
    private final String topic;
    private final int bytes;

    private OpenLoop(DefaultMQProducer producer, String topic, int bytes) {
        this.producer = producer;
        this.topic = topic;
        this.bytes = bytes;
    }

    /** Arguments: name server, topic, bytes of a body, "auto" or "single" (whether the client makes batches). */
    public static void main(String[] given) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("omb-java");
        producer.setNamesrvAddr(given[0]);
        producer.setAutoBatch(given[3].equals("auto"));
        producer.start();
        OpenLoop loop = new OpenLoop(producer, given[1], Integer.parseInt(given[2]));
        Scanner lines = new Scanner(System.in);
        while (lines.hasNextLine()) {
            String[] words = lines.nextLine().split(" ");
            loop.run(Long.parseLong(words[0]), Long.parseLong(words[1]), Integer.parseInt(words[2]), words[3]);
        }
        System.exit(0);
    }

    private void run(long began, long rate, int count, String file) throws Exception {
        long[] sent = new long[count];
        long[] acknowledged = new long[count];
        AtomicInteger done = new AtomicInteger();
        AtomicInteger errors = new AtomicInteger();
        AtomicReference<String> error = new AtomicReference<>("");
        int number = 0;
        while (number < count) {
            long elapsed = System.nanoTime() - began;
            if (elapsed < 0) {
                LockSupport.parkNanos(-elapsed);
                continue;
            }
            int due = (int) Math.min(elapsed * rate / SECOND + 1, count);
            if (errors.get() > 0 || due - done.get() > BEHIND * rate) {
                break;
            }
            for (; number < due; number++) {
                int at = number;
                byte[] body = new byte[bytes];
                java.util.Arrays.fill(body, (byte) 'x');
                ByteBuffer.wrap(body).putLong(began + dueAt(at, rate));
                sent[at] = System.nanoTime();
                try {
                    producer.send(new Message(topic, body), new SendCallback() {
                        @Override
                        public void onSuccess(SendResult result) {
                            acknowledged[at] = System.nanoTime();
                            done.incrementAndGet();
                        }

                        @Override
                        public void onException(Throwable refused) {
                            error.compareAndSet("", String.valueOf(refused));
                            errors.incrementAndGet();
                            done.incrementAndGet();
                        }
                    });
                } catch (Exception refused) {
                    error.compareAndSet("", String.valueOf(refused));
                    errors.incrementAndGet();
                    done.incrementAndGet();
                }
            }
            LockSupport.parkNanos(Math.max(began + dueAt(number, rate) - System.nanoTime(), TICK));
        }
        long deadline = System.nanoTime() + PATIENCE;
        while (done.get() < number && System.nanoTime() < deadline) {
            Thread.sleep(10);
        }
        try (FileChannel out = new FileOutputStream(file).getChannel()) {
            write(out, sent, number);
            write(out, acknowledged, number);
        }
        String text = error.get().replaceAll("[^ -~]|[\"\\\\]", " ");
        int pending = number - done.get();
        System.out.println(
            "{\"errors\": " + errors + ", \"error\": \"" + text + "\", \"pending\": " + pending + "}");
        System.out.flush();
    }

    private static long dueAt(long number, long rate) {
        return (number * SECOND + rate - 1) / rate;
    }

    static void write(FileChannel out, long[] values, int count) throws Exception {
        ByteBuffer buffer = ByteBuffer.allocate(8 * count).order(ByteOrder.nativeOrder());
        buffer.asLongBuffer().put(values, 0, count);
        while (buffer.hasRemaining()) {
            out.write(buffer);
        }
    }
}
