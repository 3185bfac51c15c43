import com.alibaba.fastjson2.JSONObject;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.common.message.MessageQueue;

/** Answers for each queue and time with the offset of the first message that was stored then or later. */
@SuppressWarnings("deprecation")
public final class Offsets {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            JSONObject request = lines.next();
            DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("interop-offsets");
            consumer.setNamesrvAddr(request.getString("nameServer"));
            consumer.start();
            while ((request = lines.next()) != null) {
                MessageQueue queue = new MessageQueue(
                    request.getString("topic"), request.getString("brokerName"), request.getIntValue("queueId"));
                Map<String, Object> answer = new LinkedHashMap<>();
                answer.put("offset", consumer.searchOffset(queue, request.getLongValue("timestamp")));
                lines.answer(answer);
            }
        });
    }
}
