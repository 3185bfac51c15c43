import com.alibaba.fastjson2.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.message.MessageExt;

/** Consumes the next messages of a group, answers each one, and stops after a number of them. */
public final class PushConsumer {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            JSONObject request = lines.next();
            CountDownLatch missing = new CountDownLatch(request.getIntValue("count"));
            DefaultMQPushConsumer consumer = Consumers.of(request);
            consumer.setConsumeMessageBatchMaxSize(1);
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                synchronized (lines) {
                    if (missing.getCount() == 0) {
                        return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                    }
                    try {
                        lines.answer(describe(messages.get(0)));
                    } catch (Exception failed) {
                        throw new IllegalStateException(failed);
                    }
                    missing.countDown();
                    return ConsumeOrderlyStatus.SUCCESS;
                }
            });
            consumer.start();
            missing.await(request.getLongValue("withinMs"), TimeUnit.MILLISECONDS);
            // Waits for running listeners, and then commits the offsets.
            consumer.setAwaitTerminationMillisWhenShutdown(10_000);
            consumer.shutdown();
        });
    }

    private static Map<String, Object> describe(MessageExt message) {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("keys", Lines.base64(message.getKeys().getBytes(StandardCharsets.UTF_8)));
        found.put("queueId", message.getQueueId());
        found.put("queueOffset", message.getQueueOffset());
        return found;
    }
}
