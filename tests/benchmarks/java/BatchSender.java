import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.LongAdder;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/** Sends messages for a given time, and prints the number of stored messages per second. */
public final class BatchSender {
    private static final long WARM_UP_MS = 2_500;

    /** Value of the argument "messages in a batch" for single messages with a delay. */
    private static final int DELAYED = 0;
    /** Value of the argument "messages in a batch" for single messages that the client joins to batches. */
    private static final int AUTO = -1;

    /** Arguments: name server, topic, bytes of a body, threads, messages in a batch, milliseconds. */
    public static void main(String[] given) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench-java");
        producer.setNamesrvAddr(given[0]);
        producer.setAutoBatch(Integer.parseInt(given[4]) == AUTO);
        producer.start();
        byte[] body = new byte[Integer.parseInt(given[2])];
        Arrays.fill(body, (byte) 'x');
        int threads = Integer.parseInt(given[3]);
        int batch = Integer.parseInt(given[4]);
        run(producer, given[1], body, threads, batch, WARM_UP_MS);
        System.out.println(run(producer, given[1], body, threads, batch, Long.parseLong(given[5])));
        producer.shutdown();
        System.exit(0);
    }

    private static double run(DefaultMQProducer producer, String topic, byte[] body, int threads, int batch, long ms)
            throws Exception {
        LongAdder stored = new LongAdder();
        long began = System.nanoTime();
        long until = began + ms * 1_000_000;
        List<Thread> running = new ArrayList<>();
        for (int number = 0; number < threads; number++) {
            Thread thread = new Thread(() -> {
                if (batch > 0) {
                    sendBatches(producer, topic, body, batch, until, stored);
                } else {
                    sendSingles(producer, topic, body, batch == DELAYED, until, stored);
                }
            });
            thread.start();
            running.add(thread);
        }
        for (Thread thread : running) {
            thread.join();
        }
        return stored.sum() / ((System.nanoTime() - began) / 1e9);
    }

    private static void sendBatches(
            DefaultMQProducer producer, String topic, byte[] body, int batch, long until, LongAdder stored) {
        int row = 0;
        while (System.nanoTime() < until) {
            List<Message> messages = new ArrayList<>(batch);
            for (int at = 0; at < batch; at++) {
                messages.add(new Message(topic, "tag", "key-" + (1_000_000 + row++ % 1_000_000), body));
            }
            try {
                if (producer.send(messages).getSendStatus() == SendStatus.SEND_OK) {
                    stored.add(batch);
                }
            } catch (Exception refused) {
                // The broker is busy. It stored none of these messages, so they are not counted.
            }
        }
    }

    private static void sendSingles(
            DefaultMQProducer producer, String topic, byte[] body, boolean delayed, long until, LongAdder stored) {
        int mostInFlight = delayed ? 256 : 20_000;
        Semaphore room = new Semaphore(mostInFlight);
        AtomicLong row = new AtomicLong();
        try {
            while (System.nanoTime() < until) {
                Message message = new Message(topic, "tag", "key-" + (1_000_000 + row.getAndIncrement() % 1_000_000), body);
                if (delayed) {
                    message.setDelayTimeLevel(18);
                }
                room.acquire();
                producer.send(message, new SendCallback() {
                    @Override
                    public void onSuccess(SendResult result) {
                        stored.increment();
                        room.release();
                    }

                    @Override
                    public void onException(Throwable refused) {
                        room.release();
                    }
                });
            }
            room.acquire(mostInFlight);
        } catch (Exception interrupted) {
            throw new IllegalStateException(interrupted);
        }
    }
}
