import com.alibaba.fastjson2.JSONObject;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Consumes the messages of a topic once. Those without the tag "good" go to the dead-letter topic of the group, those with
 * "later" to its retry topic, after this program has ended.
 */
public final class DeadLetters {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            JSONObject request = lines.next();
            CountDownLatch missing = new CountDownLatch(request.getIntValue("count"));
            DefaultMQPushConsumer consumer = Consumers.of(request);
            consumer.setAwaitTerminationMillisWhenShutdown(30_000);
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                MessageExt message = messages.get(0);
                try {
                    synchronized (lines) {
                        lines.answer(describe(message));
                    }
                } catch (Exception failed) {
                    throw new IllegalStateException(failed);
                }
                missing.countDown();
                // Level 2 is five seconds. -1 is the dead-letter topic.
                context.setDelayLevelWhenNextConsume("later".equals(message.getTags()) ? 2 : -1);
                return "good".equals(message.getTags())
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
            consumer.start();
            missing.await(request.getLongValue("withinMs"), TimeUnit.MILLISECONDS);
            // Waits until the broker has the rejected messages.
            consumer.shutdown();
        });
    }

    private static Map<String, Object> describe(MessageExt message) {
        return Map.of("body", Lines.base64(message.getBody()));
    }
}
