import com.alibaba.fastjson2.JSONObject;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.client.trace.TraceBean;
import org.apache.rocketmq.client.trace.TraceContext;
import org.apache.rocketmq.client.trace.TraceDataEncoder;

/** Decodes the body of a trace message like RocketMQ's tools, and answers each record. */
public final class Traces {
    public static void main(String[] files) {
        Lines.serve(files, lines -> {
            for (JSONObject request = lines.next(); request != null; request = lines.next()) {
                for (TraceContext context : TraceDataEncoder.decoderFromTraceDataString(request.getString("text"))) {
                    lines.answer(answer(context));
                }
            }
        });
    }

    private static Map<String, Object> answer(TraceContext context) {
        TraceBean bean = context.getTraceBeans().get(0);
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("traceType", context.getTraceType().name());
        answer.put("timeStamp", context.getTimeStamp());
        answer.put("regionId", context.getRegionId());
        answer.put("groupName", context.getGroupName());
        answer.put("costTime", context.getCostTime());
        answer.put("success", context.isSuccess());
        answer.put("topic", bean.getTopic());
        answer.put("msgId", bean.getMsgId());
        answer.put("offsetMsgId", bean.getOffsetMsgId());
        answer.put("tags", bean.getTags());
        answer.put("keys", bean.getKeys());
        answer.put("storeHost", bean.getStoreHost());
        answer.put("bodyLength", bean.getBodyLength());
        answer.put("msgType", bean.getMsgType().name());
        return answer;
    }
}
