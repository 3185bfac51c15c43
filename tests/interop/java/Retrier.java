import com.alibaba.fastjson2.JSONObject;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.message.MessageExt;

/** Rejects each message of a topic once, and answers each delivery, until all have come twice or the time is over. */
public final class Retrier {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            JSONObject request = lines.next();
            CountDownLatch missing = new CountDownLatch(request.getIntValue("count"));
            DefaultMQPushConsumer consumer = Consumers.of(request);
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                MessageExt message = messages.get(0);
                try {
                    synchronized (lines) {
                        lines.answer(describe(message));
                    }
                } catch (Exception failed) {
                    throw new IllegalStateException(failed);
                }
                if (message.getReconsumeTimes() == 0) {
                    // Level 1 is one second.
                    context.setDelayLevelWhenNextConsume(1);
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                missing.countDown();
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            missing.await(request.getLongValue("withinMs"), TimeUnit.MILLISECONDS);
        });
    }

    private static Map<String, Object> describe(MessageExt message) {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("body", Lines.base64(message.getBody()));
        found.put("msgId", message.getMsgId());
        found.put("reconsumeTimes", message.getReconsumeTimes());
        return found;
    }
}
