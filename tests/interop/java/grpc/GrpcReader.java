import com.alibaba.fastjson2.JSONObject;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;

/** Reads topics with the client for proxies as a new group, until the number or the time is reached. */
public final class GrpcReader {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            JSONObject request = lines.next();
            List<String> topics = request.getList("topics", String.class);
            Map<String, FilterExpression> subscriptions = new HashMap<>();
            topics.forEach(topic -> subscriptions.put(topic, FilterExpression.SUB_ALL));
            ClientConfiguration configuration = ClientConfiguration.newBuilder()
                .setEndpoints(request.getString("endpoints"))
                .enableSsl(false)
                .build();
            SimpleConsumer consumer = ClientServiceProvider.loadService().newSimpleConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(request.getString("group"))
                .setAwaitDuration(Duration.ofSeconds(5))
                .setSubscriptionExpressions(subscriptions)
                .build();
            CountDownLatch missing = new CountDownLatch(request.getIntValue("count"));
            Set<String> known = ConcurrentHashMap.newKeySet();
            // A call reads one topic of one broker, and returns at most 32 messages.
            for (int each = 0; each < 8 * topics.size(); each++) {
                Thread reader = new Thread(() -> read(consumer, lines, known, missing));
                reader.setDaemon(true);
                reader.start();
            }
            missing.await(request.getLongValue("withinMs"), TimeUnit.MILLISECONDS);
        });
    }

    private static void read(SimpleConsumer consumer, Lines lines, Set<String> known, CountDownLatch missing) {
        while (missing.getCount() > 0) {
            try {
                // The server returns the messages of a failed call again after these 15 seconds.
                for (MessageView message : consumer.receive(32, Duration.ofSeconds(15))) {
                    // The same is true of a message whose acknowledgement was too late, so skip it the second time.
                    if (known.add(message.getMessageId().toString())) {
                        synchronized (lines) {
                            lines.answer(describe(message));
                        }
                        missing.countDown();
                    }
                    consumer.ack(message);
                }
            } catch (Exception failed) {
                failed.printStackTrace();
            }
        }
    }

    private static Map<String, Object> describe(MessageView message) {
        ByteBuffer body = message.getBody();
        byte[] bytes = new byte[body.remaining()];
        body.get(bytes);
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("topic", message.getTopic());
        found.put("body", Lines.base64(bytes));
        found.put("keys", new ArrayList<>(message.getKeys()));
        found.put("tag", message.getTag().orElse(null));
        found.put("group", message.getMessageGroup().orElse(null));
        found.put("properties", message.getProperties());
        found.put("msgId", message.getMessageId().toString());
        found.put("bornTimestamp", message.getBornTimestamp());
        return found;
    }
}
